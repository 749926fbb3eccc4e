"""What a `tokenizer.json` says, whatever it holds, and the variants encoders are given."""

from __future__ import annotations

import json
from typing import Any

import pytest

from olm_data.errors import InputError
from olm_data.tokenizer.definition import Definition


def definition(**parts: Any) -> Definition:
    model = {"type": "BPE", "vocab": {"a": 0, "<s>": 1}, "merges": []}
    return Definition(json.dumps({"model": model} | parts).encode(), "t")


@pytest.mark.parametrize("data", [b"", b"[]", b'{"model": 3}', b"{" * 1000])
def test_what_is_no_object_with_a_model_is_refused(data: bytes) -> None:
    with pytest.raises(InputError):
        Definition(data, "t")


@pytest.mark.parametrize(
    ("normalizer", "form", "rewrites"),
    [
        (None, None, ""),
        ({"type": "NFC"}, "NFC", "NFC"),
        ({"type": "Sequence", "normalizers": [{"type": "NFD"}]}, "NFD", "NFD"),
        ({"type": "Prepend", "prepend": "_"}, None, ""),
        ({"type": "Replace", "pattern": {"String": " "}, "content": "_"}, None, ""),
        ({"type": "Replace", "pattern": {"Regex": " +"}, "content": "_"}, None, "Replace"),
        (17, None, ""),
    ],
)
def test_the_normaliser_is_a_form_or_named_by_its_first_rule(
    normalizer: Any, form: str | None, rewrites: str
) -> None:
    found = definition(normalizer=normalizer)
    assert (found.form, found.rewrites) == (form, rewrites)


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_rules_that_multiply_text_are_refused(part: str) -> None:
    rule = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10}
    key = f"{part}s"
    with pytest.raises(InputError, match="multiplies text"):
        definition(**{part: {"type": "Sequence", key: [rule, rule]}})


def test_a_variant_marks_and_strips_tokens_and_leaves_the_definition_as_it_was() -> None:
    added = [{"content": "<s>", "id": 1}, {"content": "<x>", "id": 2, "special": True}]
    found = definition(added_tokens=added, truncation={"max_length": 8})
    assert found.special_tokens == {"<x>": 2}
    whole = json.loads(found.variant({"<s>", "<x>"}))
    assert [token["special"] for token in whole["added_tokens"]] == [True, True]
    assert whole["truncation"] is whole["padding"] is None
    assert json.loads(found.variant({"<s>"}, strip_special=True))["added_tokens"] == []
    hidden = json.loads(found.variant({"<s>"}, unspellable=True))["model"]["vocab"]
    assert "<s>" not in hidden
    assert sorted(hidden.values()) == [0, 1]
    assert found.special_tokens == {"<x>": 2}
    assert found.bpe.vocab == {"a": 0, "<s>": 1}
