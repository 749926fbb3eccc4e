"""Helpers for tests that tokenise: write inputs, run in this process, compare outputs."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.inline_runner import InlineRunner

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.options import Options
from olm_data.progress import Progress
from olm_data.runners.base import Runner
from olm_data.select.selection import content_hashes, document_digests
from olm_data.tokenization.recipe import Recipe, read_recipe
from olm_data.tokenization.request import Request, prepare
from olm_data.tokenization.summary import Summary
from olm_data.tokenization.tokenize import tokenize

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "import os\n\ndef f(x):\n\treturn x ** 2\n",
    "caf\u00e9 \u4f60\u597d \U0001f600",
    "nul \x00 and escape \x1b[31m stay",
    "a text that spells <|endoftext|> in the middle",
]

TWO_SOURCES = """\
version: 1
seed: 7
sequence_length: 64
packing: concat
sources:
  a: {data: a}
  b: {data: b}
stages:
  - {name: main, tokens: 640, weights: {a: 1, b: 1}}
"""
"""The manifest of a mixture of the datasets `a` and `b` beside it."""


def texts(count: int, start: int = 0) -> list[str]:
    """Return `count` different short documents."""
    return [
        f"{n}: {TEXTS[n % len(TEXTS)]} {'word ' * (n % 7)}" for n in range(start, start + count)
    ]


def hashes_of(documents: list[str]) -> np.ndarray:
    """Return the content hashes of texts, uint64."""
    data = [text.encode() for text in documents]
    offsets = np.cumsum([0, *map(len, data)])
    return content_hashes(document_digests(np.frombuffer(b"".join(data), np.uint8), offsets))


def write_jsonl(path: Path, documents: Iterable[str | bytes]) -> Path:
    """Write documents as `{"id": n, "text": ...}` lines; bytes are written as they are."""
    with open(path, "wb") as file:
        for n, text in enumerate(documents):
            line = text
            if isinstance(text, str):
                line = json.dumps({"id": f"{path.stem}-{n}", "text": text}).encode()
            assert isinstance(line, bytes)
            file.write(line + b"\n")
    return path


def make_request(
    inputs: Sequence[Path | str], tokenizer: Path, output: str | None = None, **fields: Any
) -> Request:
    """Return the request of a recipe with these fields."""
    recipe = make_recipe(inputs, tokenizer=tokenizer, output=output or "out", **fields)
    return prepare(recipe, recipe.inputs)


def make_recipe(inputs: Sequence[Path | str], **fields: Any) -> Recipe:
    """Return a recipe; `hf` encodes where nothing is said."""
    given = {"encoder": "hf"} | fields
    given = {k: str(v) if isinstance(v, Path) else v for k, v in given.items() if v is not None}
    return read_recipe((), given | {"inputs": [str(item) for item in inputs]})


def make_dataset(
    inputs: Sequence[Path | str],
    tokenizer: Path,
    output: Path | str,
    *,
    runner: Runner | None = None,
    log: io.StringIO | None = None,
    **fields: Any,
) -> Summary:
    """Tokenise `inputs` into `output`, in this process unless a runner is given."""
    request = make_request(inputs, tokenizer, str(output), **fields)
    return tokenize(
        request,
        runner=runner or InlineRunner(),
        progress=Progress("tokenize", stream=log or io.StringIO()),
    )


def tokenized(made: Summary | Dataset) -> Options:
    """Return the options in the manifest of what was tokenised."""
    assert made.manifest.tokenized is not None
    return made.manifest.tokenized


def digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file below `folder`, hidden ones included, by relative path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
