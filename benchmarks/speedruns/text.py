"""What all contestants learn from and are measured on: the documents of the same shards.

    quickstart's commands -> tokenizer, shards, held-out shards of each source
        -> ours: a mixture lock;  tokens: a stream of a source;  characters: its text again

A tokenizer of bytes gives the text back, so characters and tokens are of the same documents.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

import olm_data
from olm_data.dataset.dataset import Dataset

QUICKSTART = Path(__file__).resolve().parents[2] / "pipelines" / "quickstart"
EVAL_TOKENS = 16_384
"""Of a batch, at least a row."""
EPOCHS = 1000
"""More than any budget reads; how many it read is printed."""

Logits = Callable[[Tensor], Tensor]
"""ids int64 [b, S] -> logits [b, S, V]."""


@dataclass(frozen=True)
class Source:
    """Documents to learn from and documents to be measured on.

    Attributes:
        share: of the tokens that are trained on.
        train, held_out: folders of datasets.
    """

    name: str
    share: float
    train: Path
    held_out: Path

    @cached_property
    def text(self) -> str:
        """All documents to learn from, one after the other."""
        return "".join(document.text for document in Dataset.open(str(self.train)))

    @cached_property
    def held_out_texts(self) -> list[str]:
        """The documents to be measured on."""
        return [document.text for document in Dataset.open(str(self.held_out))]

    @property
    def tokens(self) -> np.ndarray:
        """All tokens to learn from, each document with its end."""
        return np.concatenate([d.tokens for d in Dataset.open(str(self.train))])

    @property
    def held_out_tokens(self) -> list[np.ndarray]:
        """The tokens to be measured on, by document."""
        return [document.tokens for document in Dataset.open(str(self.held_out))]

    @property
    def held_out_bytes(self) -> int:
        """Bytes of the text to be measured on."""
        return sum(d.text_bytes for d in Dataset.open(str(self.held_out)))


def quickstart_sources(folder: Path) -> list[Source]:
    """Return the quickstart's sources, made by its own commands if they are not there yet."""
    script = (QUICKSTART / "run.sh").read_text()
    (vocabulary,) = re.findall(r"--vocab-size (\d+)", script)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        _command("train-tokenizer", "--source", "pylib", "--subset", "stdlib",
                 "--vocab-size", vocabulary, "--output", str(tokenizer))  # fmt: skip
    weights = yaml.safe_load((QUICKSTART / "mix.yaml").read_text())["stages"][0]["weights"]
    sources = []
    for name, subset, share in re.findall(r"^tokenize (\w+) (\w+) ([\d.]+)$", script, re.M):
        output = folder / "tokens" / name
        if not (output / "manifest.json").exists():
            _command("tokenize", "--source", "pylib", "--subset", subset,
                     "--tokenizer", str(tokenizer), "--output", str(output),
                     "--holdout", share)  # fmt: skip
        weight = weights[name] / sum(weights.values())
        sources.append(Source(name, weight, output, output / "validation"))
    return sources


def lock_of(sources: Sequence[Source], tokens: int, sequence_length: int, folder: Path) -> Path:
    """Return a mixture lock of so many tokens, in the sources' shares."""
    manifest = {
        "version": 1,
        "seed": 20260101,
        "sequence_length": sequence_length,
        "packing": "concat",
        "sources": {s.name: {"data": str(s.train), "max_epochs": EPOCHS} for s in sources},
        "stages": [
            {"name": "main", "tokens": tokens, "weights": {s.name: s.share for s in sources}}
        ],
    }
    (folder / "mix.yaml").write_text(yaml.safe_dump(manifest))
    olm_data.mix(folder / "mix.yaml", folder / "mixture.lock.json", overwrite=True)
    return folder / "mixture.lock.json"


class Windows:
    """Random windows of the streams of sources, each source as often as its share.

    Args:
        streams: ids of each source, one after the other.
        shares: of each source; they add up to 1.
        length: ids of a window, and the one after it.
    """

    def __init__(
        self, streams: Sequence[np.ndarray], shares: Sequence[float], length: int, seed: int
    ) -> None:
        self._streams, self._shares, self._length = streams, shares, length
        self._random = np.random.default_rng(seed)

    def draw(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels, int64 [rows, length]."""
        windows = []
        for source in self._random.choice(len(self._streams), size=rows, p=self._shares):
            stream = self._streams[source]
            start = self._random.integers(len(stream) - self._length)
            windows.append(stream[start : start + self._length + 1])
        both = torch.from_numpy(np.stack(windows).astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def held_out_rows(
    documents: Sequence[np.ndarray], length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield inputs and labels of each document, cut into rows of at most `length`, in order."""
    for document in documents:
        for start in range(0, len(document) - 1, length):
            piece = document[start : start + length + 1]
            yield piece[:-1], piece[1:]


@torch.no_grad()
def bits_per_byte(
    logits: Logits,
    documents: Sequence[np.ndarray],
    size: int,
    length: int,
    device: torch.device | None = None,
) -> float:
    """Return the bits that a model needs for documents, over their bytes.

    Rows do not overlap and stay inside a document; its first id is given, as in our evaluation.
    """
    rows = sorted(held_out_rows(documents, length), key=lambda row: len(row[0]))
    nats, at = 0.0, 0
    while at < len(rows):
        width = len(rows[at][0])
        most = at + max(1, EVAL_TOKENS // length)
        batch = [row for row in rows[at:most] if len(row[0]) == width]
        at += len(batch)
        inputs, labels = (
            torch.from_numpy(np.stack(part).astype(np.int64)).to(device)
            for part in zip(*batch, strict=True)
        )
        found = logits(inputs).float().flatten(0, 1)
        nats += float(F.cross_entropy(found, labels.flatten(), reduction="sum"))
    return nats / np.log(2) / size


def _command(*arguments: str) -> None:
    code = "from olm_data.cli import entry; entry()"
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=sys.stderr)
