"""Which records a recipe takes becomes part of a source, or is refused."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from support.reading import resolve_source
from support.tokenizing import texts, write_jsonl

from olm_data.errors import InputError, UsageError
from olm_data.sources import plan_units, read_units
from olm_data.tokenization.select_documents import select_documents


@pytest.mark.parametrize("separator", [None, "blank-lines"])
def test_text_files_end_at_a_limit_too(separator: str | None, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{name} {k}" for k in range(4)))
    source = resolve_source([str(tmp_path)], separator=separator)
    documents = {None: 2, "blank-lines": 8}[separator]
    for limit in range(1, documents + 2):
        chosen = select_documents(source, limit=limit)
        units = [
            unit
            for index, input in enumerate(chosen.inputs)
            for unit in plan_units(index, input, chosen.options, 1 << 20)
        ]
        read = list(read_units(chosen.inputs, units, chosen.options))
        assert sum(batch.documents for batch in read) == min(limit, documents)
        assert sum(batch.rows_in for batch in read) == min(limit, documents)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sample": Fraction(0)}, UsageError, "more than nothing"),
        ({"exclude_ids": "{}/0.jsonl"}, UsageError, "in text files"),
        ({"exclude_ids": "{}/gone.txt"}, InputError, "no such file"),
        ({"exclude_ids": "{}/empty.txt"}, InputError, "holds no id"),
        ({"exclude_ids": "{}/odd.txt"}, InputError, "not valid UTF-8"),
    ],
)
def test_a_selection_that_cannot_be_made_is_refused(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "0.jsonl", texts(3))
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "odd.txt").write_bytes(b"good\nalso\n\xff\n")
    options = {n: v.format(tmp_path) if isinstance(v, str) else v for n, v in options.items()}
    with pytest.raises(error, match=message) as caught:
        select_documents(resolve_source([str(tmp_path / "0.jsonl")]), **options)
    if "odd" in str(options):
        assert "odd.txt, line 3" in str(caught.value)


def test_records_without_ids_cannot_be_left_out_by_id(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "ids.txt").write_text("one")
    source = resolve_source([str(tmp_path / "a.jsonl")])
    with pytest.raises(InputError, match="no ids to leave out by") as caught:
        select_documents(source, exclude_ids=str(tmp_path / "ids.txt"))
    assert "--id-column" in str(caught.value.fix)
