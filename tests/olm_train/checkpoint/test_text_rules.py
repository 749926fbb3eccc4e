"""How texts of a model of transformers begin and end: as transformers has it, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hf_talker import POSITIONS, save_hf_talker

from olm_data.errors import InputError, ValidationError
from olm_train.checkpoint.portable import open_portable
from olm_train.checkpoint.text_rules import TextRules

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf_talker(tmp_path_factory.mktemp("rules") / "talker")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "talker")


def change(folder: Path, name: str, how: Change) -> None:
    value = json.loads((folder / name).read_text())
    how(value)
    (folder / name).write_text(json.dumps(value))


def rules(folder: Path) -> TextRules:
    found = open_portable(folder, "latest", print)
    return found.rules(found.tokenizer())


def test_as_transformers_saved_them(saved: Path) -> None:
    found = rules(saved)
    assert (found.begins, found.eos, found.first) == (300, 0, 300)
    assert (found.ends, found.context) == ((0,), POSITIONS)
    assert found.special == {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
    assert "<|im_start|>" in (found.template or "")


def test_ids_that_end_a_text_are_those_of_generation_config_then_config(folder: Path) -> None:
    change(folder, "generation_config.json", lambda v: v.update(eos_token_id=[302, 0, 302]))
    change(folder, "config.json", lambda v: v.update(eos_token_id=7))
    assert rules(folder).ends == (302, 0)
    (folder / "generation_config.json").unlink()
    assert rules(folder).ends == (7,)
    change(folder, "config.json", lambda v: v.pop("eos_token_id"))
    assert rules(folder).ends == (0,)  # the token that ends documents
    change(folder, "config.json", lambda v: v.update(eos_token_id="</s>"))
    with pytest.raises(ValidationError, match="eos_token_id is </s>, which is no id"):
        rules(folder)


def test_without_a_post_processor_nothing_stands_before_a_prompt(folder: Path) -> None:
    change(folder, "tokenizer.json", lambda v: v.update(post_processor=None))
    change(folder, "config.json", lambda v: v.update(bos_token_id=301))
    (folder / "generation_config.json").unlink()
    found = rules(folder)
    assert (found.begins, found.first) == (None, 301)  # an empty prompt begins as in transformers


def test_a_length_without_a_limit_is_read(folder: Path) -> None:
    change(folder, "tokenizer_config.json", lambda v: v.update(model_max_length=int(1e30)))
    assert rules(folder).eos == 0


def test_templates_by_name_need_a_default(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    change(folder, "tokenizer_config.json", lambda v: v.update(chat_template=named))
    assert rules(folder).template == "D"
    change(folder, "tokenizer_config.json", lambda v: v.update(chat_template=named[:1]))
    with pytest.raises(InputError, match="none is the default: tool_use"):
        rules(folder)
    for odd in ([{"name": ["x"], "template": "T"}], ["T", 5, {}], [{"name": {}}]):
        change(folder, "tokenizer_config.json", lambda v, odd=odd: v.update(chat_template=odd))
        with pytest.raises(InputError, match="none is the default"):
            rules(folder)
    change(folder, "tokenizer_config.json", lambda v: v.pop("chat_template"))
    assert rules(folder).template is None


def test_a_tokenizer_that_cannot_be_used_is_refused(folder: Path) -> None:
    extra = {"300": {"content": "<s>"}, "304": {"content": "<|tool|>"}}
    change(folder, "tokenizer_config.json", lambda v: v.update(added_tokens_decoder=extra))
    with pytest.raises(InputError, match=r"1 tokens that are not in .*'<\|tool\|>'"):
        rules(folder)
    change(folder, "tokenizer_config.json", lambda v: v.pop("added_tokens_decoder"))
    twice = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
    twice["special_tokens"] = {"<s>": {"id": "<s>", "ids": [300], "tokens": ["<s>"]}}
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    twice["single"] = [begin, begin, {"Sequence": {"id": "A", "type_id": 0}}]
    change(folder, "tokenizer.json", lambda v: v.update(post_processor=twice))
    with pytest.raises(InputError, match="puts 2 tokens before each text"):
        rules(folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(InputError, match=r"without a tokenizer\.json; it has a tokenizer\.model"):
        rules(folder)
