"""What a recipe names becomes a plan, or is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.tokenizing import make_dataset, make_request, texts, write_jsonl

from olm_data.errors import InputError


def test_inputs_of_the_plan_do_not_depend_on_where_they_lie(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    plans = []
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        files = [write_jsonl(tmp_path / folder / f"{k}.jsonl", texts(9)) for k in range(2)]
        plans.append(make_request(files, tiny_tokenizer).plan.digest)
    assert plans[0] == plans[1]


def test_a_file_name_that_is_no_unicode_is_refused(tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(3))
    odd = source.rename(tmp_path / os.fsdecode(b"\xff.jsonl"))
    with pytest.raises(InputError, match="UTF-8") as caught:
        make_dataset([odd], tiny_tokenizer, tmp_path / "out")
    assert str(caught.value).isascii()
