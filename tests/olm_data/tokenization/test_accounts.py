"""Every record read ends in one count of its input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.account import InputAccount, check_accounts
from olm_data.dataset.inputs import Unit
from olm_data.errors import ValidationError
from olm_data.tokenization.pipeline import runs


def test_every_record_is_a_document_or_a_counted_drop(tiny_tokenizer: Path, tmp_path: Path) -> None:
    lines: list[Any] = [*texts(20), "", " \n\t ", b"{broken", b'{"id": 1}', b'{"text": "\xff\xfe"}']
    source = write_jsonl(tmp_path / "a.jsonl", lines)
    made = make_dataset([source], tiny_tokenizer, tmp_path / "out", max_bad="3")
    assert made.manifest.dropped == {
        "empty": 2,
        "invalid_utf8": 1,
        "malformed": 1,
        "no_text": 1,
    }
    assert made.manifest.totals.documents == 20
    assert made.manifest.totals.documents_in == 25
    assert made.manifest.inputs[0].documents == 25


def test_empty_documents_do_not_count_as_bad(tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*texts(3), *[""] * 10])
    made = make_dataset([source], tiny_tokenizer, tmp_path / "out", max_bad="0")
    assert made.manifest.dropped == {"empty": 10}


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_runs_are_the_stretches_of_equal_values(values: list[int]) -> None:
    found = runs(np.array(values))
    assert [i for first, last in found for i in range(first, last)] == list(range(len(values)))
    for first, last in found:
        assert len(set(values[first:last])) == 1
        assert last == len(values) or values[last] != values[first]


def account(**values: Any) -> InputAccount:
    ordinary: dict[str, Any] = {
        "input": 0,
        "units": ((0, 9),),
        "documents": 5,
        "held_out": 1,
        "dropped": {},
        "special_hits": 0,
        "bad": (),
        "sha256": "",
    }
    return InputAccount(**ordinary | values)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"documents": 4}, "documents: 4 by input, 5 in the shard"),
        ({"held_out": 2}, "documents held out: 2 by input, 1 in the shard"),
        ({"dropped": {"empty": 1}}, "drops"),
        ({"units": ((0, 8),)}, "units"),
        ({"units": ((0, 9), (0, 9))}, "units"),
        ({"units": ()}, "units"),
    ],
)
def test_an_account_that_does_not_add_up_is_an_error(wrong: dict[str, Any], words: str) -> None:
    sums: dict[str, Any] = {"documents": 5, "held_out": 1, "dropped": {}}
    units = [Unit(input=0, start=0, stop=9, bytes=100)]
    check_accounts("t", units, [account()], **sums)
    with pytest.raises(ValidationError, match=words):
        check_accounts("t", units, [account(**wrong)], **sums)
