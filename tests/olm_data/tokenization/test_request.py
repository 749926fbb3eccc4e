"""What a recipe names becomes a plan, or is refused."""

from __future__ import annotations

import gzip
import os

import pytest
from support.project import Project
from support.tokenizing import make_request, texts, write_jsonl

from olm_data.errors import InputError
from olm_data.tokenization import request


def test_inputs_of_the_plan_do_not_depend_on_where_they_lie(project: Project) -> None:
    plans = []
    for folder in ("x", "y"):
        (project / folder).mkdir()
        files = [write_jsonl(project / folder / f"{k}.jsonl", texts(9)) for k in range(2)]
        plans.append(make_request(files, project.tokenizer).plan.digest)
    assert plans[0] == plans[1]


def test_a_file_name_that_is_no_unicode_is_refused(project: Project) -> None:
    source = project.write("a.jsonl", texts(3))
    odd = source.rename(project / os.fsdecode(b"\xff.jsonl"))
    with pytest.raises(InputError, match="UTF-8") as caught:
        project.make([odd])
    assert str(caught.value).isascii()


def test_a_long_input_that_cannot_be_cut_is_named_beforehand(
    monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    plain = project.write("plain.jsonl", texts(300))
    packed = project / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert make_request([packed, plain], project.tokenizer).notes == ()
    monkeypatch.setattr(request, "LONG_TASK", 1000)
    (note,) = make_request([packed, plain], project.tokenizer).notes
    assert "packed.jsonl.gz: about" in note
    assert "(1 such input)" in note


def test_what_is_complete_is_said_to_be_without_proving_an_encoder(
    monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    file = project.write("a.jsonl", texts(30))
    project.make([file])
    monkeypatch.delattr(request, "find_encoder")
    assert project.make([file]).already_complete
