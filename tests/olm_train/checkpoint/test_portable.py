"""A model is opened by the place and name it is given; how its texts begin and end."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_models import hf_model
from support.hf_talker import POSITIONS, save_hf_talker
from support.runs import build_trainer
from support.seal import seal

from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.storage.store import Store
from olm_train.checkpoint.portable import open_portable
from olm_train.checkpoint.text_rules import TextRules


def quiet(error: object) -> None:
    raise AssertionError(error)


@pytest.fixture(scope="module")
def run(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("portable") / "run"
    build_trainer(
        tiny_mixture, folder, "--trainer.callbacks.checkpointer.save_interval=1", quiet=True, stop=2
    ).fit()
    return folder


@pytest.mark.parametrize(
    ("place", "name", "step"),
    [("", "latest", 2), ("", "1", 1), ("", "step00000001", 1), ("step00000001", "latest", 1)],
)
def test_a_step_a_name_or_the_newest(run: Path, place: str, name: str, step: int) -> None:
    found = open_portable(run / place, name, quiet)
    assert (found.step, found.name) == (step, f"step{step:08d}")
    assert found.model().config.vocab_size >= found.recorded_lock.tokenizer.vocab_size


@pytest.mark.parametrize("name", ["7", "step00000007", "newest"])
def test_a_name_without_a_checkpoint_is_refused(run: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"no checkpoint {name}"):
        open_portable(run, name, quiet)


def test_a_damaged_newer_one_is_told_and_passed_over(run: Path, tmp_path: Path) -> None:
    copy, told = shutil.copytree(run, tmp_path / "run"), list[str]()
    (copy / "step00000002/config.json").write_text("{}")
    assert open_portable(copy, "latest", lambda error: told.append(error.what)).step == 1
    assert ["step00000002 is damaged" in what for what in told] == [True]
    with pytest.raises(ValidationError, match=r"config\.json has 2 bytes instead of"):
        open_portable(copy, "2", quiet)


def test_a_checkpoint_without_a_lock_or_a_tokenizer_says_so(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run / "step00000002", tmp_path / "step00000002")
    (folder / "tokenizer.json").unlink()
    seal(folder)
    with pytest.raises(InputError, match="no tokenizer with this model"):
        open_portable(folder, "latest", quiet).tokenizer()
    (folder / "mixture.lock.json").unlink()
    seal(folder)
    with pytest.raises(InputError, match=r"no mixture\.lock\.json with this model"):
        open_portable(folder, "latest", quiet)


@torch.no_grad()
def test_a_model_of_transformers_in_a_folder_or_a_bucket(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    hf_model("llama").bfloat16().save_pretrained(tmp_path / "llama")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    bucket = Store(f"memory://{uuid.uuid4().hex}/llama")
    for path in (tmp_path / "llama").iterdir():
        bucket.put(path.name, path.read_bytes())
    ids = torch.randint(0, 61, (1, 30), generator=torch.Generator().manual_seed(1))
    for place in (tmp_path / "llama", bucket.root):
        found = open_portable(place, "latest", quiet)
        assert (found.name, found.step, found.recorded_lock) == ("llama", None, None)
        model = found.model()
        assert {each.dtype for each in model.parameters()} == {torch.float32}
        torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
        with pytest.raises(UsageError, match="no checkpoint 7: this is not a run"):
            open_portable(place, "7", quiet)


def test_a_model_that_the_decoder_cannot_be_is_refused_by_its_field(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path / "llama")
    path = tmp_path / "llama/config.json"
    path.write_text(path.read_text().replace('"hidden_act": "silu"', '"hidden_act": "relu"'))
    with pytest.raises(InputError, match="hidden_act is relu"):
        open_portable(tmp_path / "llama", "latest", quiet)


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
