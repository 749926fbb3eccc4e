"""What a recipe names becomes a plan, or is refused."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from support.tokenizing import make_dataset, make_request, texts, write_jsonl

from olm_data.errors import InputError
from olm_data.tokenization import request


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


def test_a_long_input_that_cannot_be_cut_is_named_beforehand(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write_jsonl(tmp_path / "plain.jsonl", texts(300))
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert make_request([packed, plain], tiny_tokenizer).notes == ()
    monkeypatch.setattr(request, "LONG_TASK", 1000)
    (note,) = make_request([packed, plain], tiny_tokenizer).notes
    assert "packed.jsonl.gz: about" in note
    assert "(1 such input)" in note


def test_what_is_complete_is_said_to_be_without_proving_an_encoder(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", texts(30))
    make_dataset([file], tiny_tokenizer, tmp_path / "out")
    monkeypatch.delattr(request, "find_encoder")
    assert make_dataset([file], tiny_tokenizer, tmp_path / "out").already_complete
