"""A dataset's own tokenizer: one way to get it, with the dataset's BOS and EOS, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.project import Project
from support.tokenizing import texts

from olm_data.dataset.tokenizer import (
    TOKENIZER,
    TokenizerInfo,
    TokenizerRules,
    own_tokenizer,
    prompt_tokenizer,
    read_own,
)
from olm_data.errors import ValidationError
from olm_data.storage.store import Store
from olm_data.tokenizer.tokenizer import load_tokenizer, spec_from_bytes


@pytest.fixture
def stored(tiny_tokenizer: Path, tmp_path: Path) -> tuple[Store, TokenizerInfo]:
    spec = load_tokenizer(tiny_tokenizer)
    (tmp_path / TOKENIZER).write_bytes(spec.json_bytes)
    return Store(tmp_path), TokenizerInfo.of(spec, "plain")


def test_it_has_the_rules_of_the_dataset(
    stored: tuple[Store, TokenizerInfo], tiny_tokenizer: Path
) -> None:
    store, info = stored
    spec, loaded = own_tokenizer(store, info, "tiny"), load_tokenizer(tiny_tokenizer)
    assert (spec.eos, spec.eos_token, spec.bos) == (loaded.eos, loaded.eos_token, None)
    assert TokenizerInfo.of(spec, "plain") == info
    assert spec.special_tokens == loaded.special_tokens
    assert spec.decode(spec.encode("one two")) == "one two"


def test_an_ordinary_token_that_ends_documents_is_special(
    stored: tuple[Store, TokenizerInfo],
) -> None:
    spec = spec_from_bytes(stored[0].read(TOKENIZER), name="tiny", eos="none")
    other = spec.delimited(eos=5, bos=7)
    assert (other.eos, other.bos) == (5, 7)
    assert {5, 7} <= set(other.special_tokens.values())
    assert spec.delimited(eos=1 << 20, bos=None).eos is None  # no token has this id


def test_another_file_or_none_is_refused(stored: tuple[Store, TokenizerInfo]) -> None:
    store, info = stored
    data = read_own(store, info)
    (Path(store.root) / TOKENIZER).write_bytes(data + b" ")
    for load in (read_own, lambda s, i: own_tokenizer(s, i, "tiny")):
        with pytest.raises(ValidationError, match="not the one the dataset was made with"):
            load(store, info)
    with pytest.raises(ValidationError, match="not the one the dataset was made with"):
        prompt_tokenizer(data + b" ", info, "here")
    (Path(store.root) / TOKENIZER).unlink()
    with pytest.raises(ValidationError, match=r"tokenizer\.json is missing"):
        own_tokenizer(store, info, "tiny")


@pytest.mark.parametrize(
    ("bos", "eos", "body", "delimiters"),
    [
        (None, None, [9, 1, 8], ()),
        (9, None, [1, 8], (9,)),
        (None, 8, [9, 1], (8,)),
        (9, 8, [1], (9, 8)),
    ],
)
def test_the_body_of_a_document_is_without_bos_and_eos(
    bos: int | None, eos: int | None, body: list[int], delimiters: tuple[int, ...]
) -> None:
    rules = TokenizerRules("", "", 10, bos, eos)
    assert (rules.body(np.array([9, 1, 8])).tolist(), rules.delimiters) == (body, delimiters)


def test_another_tokenizer_is_refused_before_it_is_tried(
    monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    project.make([project.write("a.jsonl", texts(3))], "web")
    path = project / "web/tokenizer.json"
    model = json.loads(path.read_bytes())
    model["model"]["merges"][0][0] = "x" * 1_000_000
    path.write_text(json.dumps(model))
    monkeypatch.setattr("olm_data.dataset.tokenizer.probe", pytest.fail)
    with pytest.raises(ValidationError, match="not the one the dataset was made with"):
        _ = project.open("web").tokenizer
