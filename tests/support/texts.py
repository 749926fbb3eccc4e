"""Small corpora for streams of text: files whose documents tell which one they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from olm_data.extensions.text_stream.documents import Corpus, DocumentStream, ReadingOrder, Slot
from olm_data.tokenizer.tokenizer import TokenizerSpec


def write_texts(folder: Path, sizes: Sequence[int]) -> list[str]:
    """Write a JSONL file for each size, with so many documents; return their texts."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for number, size in enumerate(sizes):
        rows = [f"file {number} text {k} " + "and so on " * (k * 7 % 5) for k in range(size)]
        lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (folder / f"part-{number:03d}.jsonl").write_text(lines)
        texts += rows
    return texts


def given(corpus: Corpus, slot: Slot, order: ReadingOrder, epoch: int = 0) -> list[str]:
    """Return the texts that a reader is given in an epoch."""
    return [
        spelled(corpus.tokenizer, doc.ids) for doc in DocumentStream(corpus, slot, order, epoch)
    ]


def spelled(tokenizer: TokenizerSpec, ids: np.ndarray) -> str:
    """Return the text of a document's ids, without its end token."""
    assert ids[-1] == tokenizer.eos
    return tokenizer.decode(ids[:-1])


def documents_of(tokens: np.ndarray, eos: int) -> Iterator[np.ndarray]:
    """Cut a stream of tokens behind each end token; what is behind the last one comes last."""
    yield from np.split(tokens, np.flatnonzero(tokens == eos) + 1)
