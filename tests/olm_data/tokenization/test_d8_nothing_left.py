"""AUDIT row D8: a selection that leaves nothing is told by its own option, with the counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tokenizing import make_dataset, write_jsonl

from olm_data.errors import InputError

ROWS: list[dict[str, Any]] = [{"id": f"d{k}", "text": f"words {k}", "score": k} for k in range(20)]


@pytest.mark.parametrize(
    ("options", "why", "cure"),
    [
        ({"where": "score > 100"}, "filtered 20 (the record does not match --where)", "--where"),
        ({"sample": "1/1000000"}, "unsampled 20", "--sample"),
        ({"holdout": "999999/1000000"}, "held out 20", "--holdout"),
        ({"where": "score > 100", "holdout": "1/2"}, "filtered 20", "--where"),
    ],
)
def test_d8_what_leaves_nothing_is_named_and_what_is_not_is_not(
    tiny_tokenizer: Path, tmp_path: Path, options: dict[str, Any], why: str, cure: str
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [json.dumps(row).encode() for row in ROWS])
    with pytest.raises(InputError) as caught:
        make_dataset([source], tiny_tokenizer, tmp_path / "out", **options)
    error = caught.value
    assert why in (error.why or "")
    said = f"{error.what} {error.why} {error.fix}"
    for option in ("--where", "--sample", "--holdout", "--text-column", "--exclude-ids"):
        assert (option in said) == (option == cure)


def test_d8_two_reasons_are_both_counted_and_the_larger_is_the_cure(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    rows = [row | ({"text": " "} if row["score"] < 15 else {}) for row in ROWS]
    source = write_jsonl(tmp_path / "a.jsonl", [json.dumps(row).encode() for row in rows])
    with pytest.raises(InputError) as caught:
        make_dataset([source], tiny_tokenizer, tmp_path / "out", where="score < 15")
    assert caught.value.why is not None
    assert caught.value.why.startswith("empty 15 (")
    assert "filtered 5 (" in caught.value.why
    assert "--text-column" in (caught.value.fix or "")
