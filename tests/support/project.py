"""A folder with a tokenizer: inputs are written there and tokenised in this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from support.adding import add_to
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.tokenization.summary import Summary
from olm_data.tokenizer.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Project:
    """`project / name` is a path in the folder; a dataset without a name is `out`."""

    folder: Path
    tokenizer: Path

    def __truediv__(self, name: Path | str) -> Path:
        return self.folder / name

    @property
    def out(self) -> Path:
        """Where a dataset lies that was given no other place."""
        return self / "out"

    @cached_property
    def inputs(self) -> list[Path]:
        """Three JSONL files of 40 documents each."""
        return [self.write(f"{k}.jsonl", texts(40, 40 * k)) for k in range(3)]

    def write(self, name: str, documents: Iterable[str | bytes]) -> Path:
        """Write documents as lines of JSON."""
        return write_jsonl(self / name, documents)

    def make(
        self, inputs: Sequence[Path | str], output: Path | str = "out", **options: Any
    ) -> Summary:
        """Tokenise `inputs`."""
        return make_dataset(inputs, self.tokenizer, self / output, **options)

    def add(self, *inputs: Path, output: Path | str = "out", **options: Any) -> Summary:
        """Add `inputs` to a dataset."""
        return add_to(self / output, *inputs, **options)

    def open(self, name: Path | str = "out", **options: Any) -> Dataset:
        """Open a dataset."""
        return Dataset.open(str(self / name), **options)

    def texts(self, name: Path | str = "out", **options: Any) -> list[str]:
        """Return the texts of all documents of a dataset, each of which ends with EOS."""
        spec = load_tokenizer(self.tokenizer)
        return [spec.decode(document.tokens[:-1]) for document in self.open(name, **options)]
