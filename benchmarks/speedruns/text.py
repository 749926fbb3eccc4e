"""What all contestants learn from and are measured on: the quickstart's files, a tenth held out.

    files -- by digest --> to learn from | held out, near copies dropped --> select | report
        -> tokenizer of what is learnt from, shards of each part
        -> ours: a mixture lock;  tokens: a stream of a source;  characters: its text again

A tokenizer of bytes gives the text back, so characters and tokens are of the same documents. What
is chosen is chosen on `select`; what is claimed is measured on `report`, once.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
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
from olm_data.sources.pylib import list_inputs

QUICKSTART = Path(__file__).resolve().parents[2] / "pipelines" / "quickstart"
HALVES = ("select", "report")
HELD_OUT = 0.05
"""Of the files, for each half. The whole corpus has some 1,600, and more is not learnt in 75 s."""
MOST_CHARACTERS = 16_384
"""Of a held-out document: a few long tables would be half of the bytes."""
WORDS = 8
"""Of a shingle, what two texts are compared by."""
COPY = 0.5
"""Share of a document's shingles that others hold, from which it counts as a near copy."""
EVAL_TOKENS = 16_384
"""Of a batch, at least a row."""
EPOCHS = 1000
"""More than any budget reads; how many it read is printed."""

_WORD = re.compile(r"\w+|[^\w\s]")

Logits = Callable[[Tensor], Tensor]
"""ids int64 [b, S] -> logits [b, S, V]."""
Texts = Callable[[str], Mapping[str, str]]
"""Subset -> texts by path."""


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
        """The tokens to be measured on, by document, each after the end of another one."""
        dataset = Dataset.open(str(self.held_out))
        before = [] if dataset.eos is None else [dataset.eos]
        return [np.concatenate([before, d.tokens]).astype(np.int64) for d in dataset]

    @cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of the text of each document to be measured on."""
        return np.array([d.text_bytes for d in Dataset.open(str(self.held_out))], np.float64)


@dataclass(frozen=True)
class Measured:
    """Bits that a model needs for each document, beside the documents' bytes."""

    bits: np.ndarray
    sizes: np.ndarray

    @property
    def per_byte(self) -> float:
        """Bits of all documents over their bytes."""
        return float(self.bits.sum() / self.sizes.sum())

    @property
    def error(self) -> float:
        """Standard error of `per_byte`, the documents drawn at random: that of a ratio."""
        count = len(self.bits)
        if count < 2:
            return math.nan
        rest = self.bits - self.per_byte * self.sizes
        return math.sqrt(count / (count - 1) * float(rest @ rest)) / float(self.sizes.sum())

    def less(self, other: Measured) -> Measured:
        """Return the difference to another model, document by document."""
        return Measured(self.bits - other.bits, self.sizes)


def split(texts: Mapping[str, str]) -> tuple[dict[str, str], dict[str, dict[str, str]], int]:
    """Divide files into those to learn from and the held-out halves, none a near copy of another.

    Where a file goes depends on its text alone. A held-out file of which `COPY` of the shingles are
    in what is learnt from, or in held-out files before it, is in neither half (a licence is).

    Args:
        texts: by path.

    Returns:
        Texts by path to learn from; of each half; and how many near copies were dropped.
    """
    train: dict[str, str] = {}
    candidates: list[tuple[float, str, str]] = []
    for path, text in texts.items():
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
        if place < HELD_OUT * len(HALVES):
            candidates.append((place, path, text[:MOST_CHARACTERS]))
        else:
            train[path] = text
    known: set[int] = set()
    for text in train.values():
        known |= shingles(text)
    halves: dict[str, dict[str, str]] = {half: {} for half in HALVES}
    for place, path, text in sorted(candidates):
        own = shingles(text)
        if len(own & known) < COPY * len(own):
            halves[HALVES[int(place / HELD_OUT)]][path] = text
            known |= own
    kept = sum(map(len, halves.values()))
    return train, halves, len(candidates) - kept


def shingles(text: str) -> set[int]:
    """Return the digests of each run of `WORDS` words and signs; of all, where there are fewer."""
    words = _WORD.findall(text)
    return {hash(tuple(words[at : at + WORDS])) for at in range(max(1, len(words) - WORDS + 1))}


def pylib_texts(subset: str) -> dict[str, str]:
    """Return the texts of a subset of the source `pylib`, by path."""
    files = list_inputs(subset).files
    return {file.path: Path(file.url).read_text("utf-8", errors="replace") for file in files}


def quickstart_sources(
    folder: Path, half: str, vocabulary: int | None = None, texts: Texts = pylib_texts
) -> list[Source]:
    """Return the quickstart's sources, made in `folder` if they are not there yet.

    Args:
        half: of the held-out documents.
        vocabulary: entries of the tokenizer; default: as many as the quickstart's has.
        texts: of a subset of the source `pylib`, by path.
    """
    script = (QUICKSTART / "run.sh").read_text()
    (found,) = re.findall(r"--vocab-size (\d+)", script)
    folder = folder / f"vocabulary-{vocabulary or found}"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = folder / "tokenizer.json"
    weights = yaml.safe_load((QUICKSTART / "mix.yaml").read_text())["stages"][0]["weights"]
    sources = []
    for name, subset in re.findall(r"^tokenize (\w+) (\w+) [\d.]+$", script, re.M):
        parts = {part: folder / part / name for part in ("train", *HALVES)}
        if not all((part / "manifest.json").exists() for part in parts.values()):
            train, halves, copies = split(texts(subset))
            kept = ", ".join(f"{len(of)} to {half}" for half, of in halves.items())
            print(
                f"{name}: {len(train)} files to learn from, {kept}; {copies} near copies left out",
                file=sys.stderr,
            )
            for part, of in {"train": train, **halves}.items():
                lines = folder / f"{name}-{part}.jsonl"
                with lines.open("w", encoding="utf-8") as out:
                    for path, text in of.items():
                        out.write(json.dumps({"id": path, "text": text}) + "\n")
                if not tokenizer.exists():  # of the code to learn from, as the quickstart's
                    _command("train-tokenizer", str(lines), "--vocab-size",
                             str(vocabulary or found), "--output", str(tokenizer))  # fmt: skip
                _command("tokenize", str(lines), "--id-column", "id", "--tokenizer",
                         str(tokenizer), "--output", str(parts[part]))  # fmt: skip
        share = weights[name] / sum(weights.values())
        sources.append(Source(name, share, parts["train"], parts[half]))
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


@torch.no_grad()
def measure(
    logits: Logits,
    documents: Sequence[np.ndarray],
    sizes: np.ndarray,
    length: int,
    device: torch.device | None = None,
) -> Measured:
    """Return the bits that a model needs for each document.

    A document is cut into rows of at most `length`, which do not overlap and stay inside of it.

    Args:
        documents: ids of each; the first one is given, all others are predicted.
        sizes: bytes of each.
    """
    rows = sorted(
        (
            (number, document[start : start + length + 1])
            for number, document in enumerate(documents)
            for start in range(0, len(document) - 1, length)
        ),
        key=lambda row: len(row[1]),
    )
    nats, at = np.zeros(len(documents)), 0
    while at < len(rows):
        width = len(rows[at][1])
        batch = [
            row for row in rows[at : at + max(1, EVAL_TOKENS // length)] if len(row[1]) == width
        ]
        at += len(batch)
        ids = torch.from_numpy(np.stack([row[1] for row in batch]).astype(np.int64)).to(device)
        found = logits(ids[:, :-1]).float()
        losses = F.cross_entropy(found.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        of_rows = losses.view(len(batch), -1).double().sum(1).cpu().numpy()
        np.add.at(nats, [row[0] for row in batch], of_rows)
    return Measured(nats / np.log(2), sizes)


def _command(*arguments: str) -> None:
    code = "from olm_data.cli import entry; entry()"
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=sys.stderr)
