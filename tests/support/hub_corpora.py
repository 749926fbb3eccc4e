"""What holds of corpora of the hub; for a process that has imported no client of it yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.texts import given

from olm_data.errors import InputError, UsageError
from olm_data.extensions.text_stream.documents import (
    DocumentStream,
    ReadingOrder,
    Slot,
    hub_corpus,
    named_corpus,
)
from olm_data.tokenizer.tokenizer import load_tokenizer

NAME = "HuggingFaceFW/fineweb-edu"
CONFIG = {"name": "sample-10BT"}


def read_by_row_groups(texts: list[str], root: Path, tokenizer: Path) -> None:
    spec = load_tokenizer(tokenizer)
    corpus = named_corpus("fineweb-edu", spec, subset="sample-10BT")
    assert given(corpus, Slot(), ReadingOrder()) == texts
    dealt = [given(corpus, Slot(n, 3), ReadingOrder(seed=1), 1) for n in range(3)]
    assert sorted(text for some in dealt for text in some) == sorted(texts)
    mirror = root / "datasets" / NAME
    assert (
        given(named_corpus("fineweb-edu", spec, root=str(mirror)), Slot(), ReadingOrder()) == texts
    )


def read_by_its_library(texts: list[str], root: Path, tokenizer: Path) -> None:
    spec = load_tokenizer(tokenizer)
    corpus = hub_corpus(NAME, spec, arguments=CONFIG)
    assert given(corpus, Slot(), ReadingOrder()) == texts
    dealt = [given(corpus, Slot(n, 3), ReadingOrder(seed=1), 1) for n in range(3)]
    assert sorted(text for some in dealt for text in some) == sorted(texts)
    other = hub_corpus(NAME, spec, arguments=CONFIG, text_column="url")
    assert given(other, Slot(), ReadingOrder())[0].startswith("https://")


def text_by_a_function(texts: list[str], root: Path, tokenizer: Path) -> None:
    spec = load_tokenizer(tokenizer)

    def text_of(row: Mapping[str, Any]) -> str | None:
        if row["text"] == texts[1]:
            return None
        if row["text"] == texts[2]:
            return "\ud800"
        return f"{row['score']}: {row['text']}"

    corpus = hub_corpus(NAME, spec, arguments=CONFIG, text_of=text_of)
    reader = DocumentStream(corpus, Slot(), ReadingOrder(), 0)
    assert len(list(reader)) == len(texts) - 2
    assert (reader.counts["no_text"], reader.counts["invalid_utf8"]) == (1, 1)
    assert given(corpus, Slot(), ReadingOrder())[0].endswith(f": {texts[0]}")
    wrong: Any = hub_corpus(NAME, spec, arguments=CONFIG, text_of=len)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="of type int, not a string"):
        list(DocumentStream(wrong, Slot(), ReadingOrder(), 0))


def refused(texts: list[str], root: Path, tokenizer: Path) -> None:
    spec = load_tokenizer(tokenizer)
    with pytest.raises(UsageError, match="'data_files', which is not taken"):
        hub_corpus(NAME, spec, arguments={"data_files": "x"})
    with pytest.raises(UsageError, match="give one"):
        hub_corpus(NAME, spec, arguments=CONFIG, text_of=str, text_column="text")
    with pytest.raises(UsageError, match="no such config or split"):
        hub_corpus(NAME, spec, arguments=CONFIG, split="test")
    with pytest.raises(UsageError, match="has no subset"):
        named_corpus("fineweb-edu", spec, subset="sample-11BT")


CHECKS = (read_by_row_groups, read_by_its_library, text_by_a_function, refused)
