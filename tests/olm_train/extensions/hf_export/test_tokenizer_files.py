"""Files of a tokenizer: every reader gives the ids that the model was trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.hf_models import OLD, hf_fields, hf_model
from support.tokenizer_kinds import SPLITS, added, bpe, unigram, variant_of, word_piece

from olm_data.dataset.tokenizer import TokenizerRules
from olm_data.errors import InputError, ValidationError
from olm_data.tokenizer.tokenizer import spec_from_bytes
from olm_train.extensions.hf.table import FAMILIES, Family, family_of_hf
from olm_train.extensions.hf_export.job import family_to_export
from olm_train.extensions.hf_export.tokenizer_files import TokenizerFiles, prove, tokenizer_files
from olm_train.model.config import DecoderConfig

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def rules_of(data: bytes, *, eos: int | None, bos: int | None = None) -> TokenizerRules:
    spec = spec_from_bytes(data, name="t", eos="none", bos="none")
    return TokenizerRules(spec.sha256, spec.probe_sha256, spec.vocab_size, bos, eos)


def made(data: bytes, template: str | None = None, **ends: Any) -> TokenizerFiles:
    rules = rules_of(data, **{"eos": 0, **ends})
    return tokenizer_files(data, rules, template, context=64, where="run")


def written(folder: Path, tokenizer: TokenizerFiles, model_type: str = "llama") -> Path:
    for name, data in tokenizer.files.items():
        (folder / name).write_bytes(data)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = {"model_type": model_type, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(tokenizer: TokenizerFiles, name: str = "tokenizer_config.json") -> Any:
    return json.loads(tokenizer.files[name])


def test_the_files_say_what_ends_and_begins_texts(tiny_tokenizer: Path) -> None:
    data = tiny_tokenizer.read_bytes()
    plain = made(data)
    config = config_of(plain)
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (config["eos_token"], config["model_max_length"]) == ("<|endoftext|>", 64)
    assert config["clean_up_tokenization_spaces"] is False
    assert config["add_bos_token"] is False
    assert "pad_token" not in config
    assert config_of(plain, "special_tokens_map.json") == {"eos_token": "<|endoftext|>"}
    assert config_of(plain, "generation_config.json")["eos_token_id"] == [0]
    assert plain.files["tokenizer.json"] == data
    none = made(data, eos=None)
    assert "eos_token" not in config_of(none)
    assert "eos_token_id" not in config_of(none, "generation_config.json")


def chat_tokenizer(plain: bytes) -> bytes:
    tokens = [added("<|endoftext|>", 0), added("<|im_start|>", 512), added("<|im_end|>", 513)]
    return variant_of(plain, added_tokens=tokens)


def test_a_chat_template_is_there_in_both_forms_and_its_turn_end_ends_generation(
    tiny_tokenizer: Path,
) -> None:
    found = made(chat_tokenizer(tiny_tokenizer.read_bytes()), CHATML)
    assert found.files["chat_template.jinja"].decode() == CHATML
    assert config_of(found)["chat_template"] == CHATML
    assert config_of(found, "generation_config.json")["eos_token_id"] == [0, 513]
    assert found.eos == (0, 513)
    plain = made(tiny_tokenizer.read_bytes(), "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert plain.eos == (0,)


def test_what_is_no_template_or_another_tokenizer_is_refused(tiny_tokenizer: Path) -> None:
    data = tiny_tokenizer.read_bytes()
    with pytest.raises(InputError, match="no Jinja template"):
        made(data, "{% if %}")
    with pytest.raises(ValidationError, match="not the one the dataset was made with"):
        tokenizer_files(data + b" ", rules_of(data, eos=0), None, context=1, where="run")


END = "<|endoftext|>"
A, B = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
POST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": END, "type_id": 0}}, A],
    "pair": [A, B],
    "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
}
CUT = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"split-{name}": {"pre_tokenizer": split} for name, split in SPLITS.items()},
    "puts a token before texts itself": {"post_processor": POST},
    "cuts texts off": {"truncation": CUT},
    "normalises": {"normalizer": {"type": "NFC"}},
}


@pytest.mark.parametrize(
    "name", [each for each in VARIANTS if not (OLD and each == "split-prefix")]
)  # which transformers 4 reads in another way, and so does not get
def test_transformers_gives_the_same_ids(tiny_tokenizer: Path, tmp_path: Path, name: str) -> None:
    found = made(variant_of(tiny_tokenizer.read_bytes(), **VARIANTS[name]))
    readers = prove(written(tmp_path, found), found)
    assert [reader.split()[0] for reader in readers] == ["tokenizers", "AutoTokenizer"]


@pytest.mark.parametrize("data", [word_piece(), unigram(), bpe()], ids=["pieces", "unigram", "bpe"])
def test_other_models_of_tokenizers(tmp_path: Path, data: bytes) -> None:
    found = made(data, eos=None)
    assert len(prove(written(tmp_path, found), found)) == 2


def test_with_a_token_that_begins_documents_readers_put_it_there(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    found = made(chat_tokenizer(tiny_tokenizer.read_bytes()), bos=512)
    prove(written(tmp_path, found), found)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("the")["input_ids"][0] == 512
    assert config_of(found, "generation_config.json")["bos_token_id"] == 512


def test_another_tokenizer_in_the_folder_is_found(tiny_tokenizer: Path, tmp_path: Path) -> None:
    found = made(tiny_tokenizer.read_bytes())
    folder = written(tmp_path, found)
    other = variant_of(tiny_tokenizer.read_bytes(), pre_tokenizer=SPLITS["digits"])
    (folder / "tokenizer.json").write_bytes(other)
    with pytest.raises(ValidationError, match="reads back as another one"):
        prove(folder, found)


def test_a_reader_that_adds_tokens_is_found(tiny_tokenizer: Path, tmp_path: Path) -> None:
    found = made(chat_tokenizer(tiny_tokenizer.read_bytes()))
    data = variant_of(found.files["tokenizer.json"], post_processor=POST)
    other = replace(found, files={**found.files, "tokenizer.json": data})
    with pytest.raises(ValidationError, match="other ids than the tokenizer"):
        prove(written(tmp_path, other), other)
    config = {**config_of(found), "eos_token": "<|im_start|>"}
    (written(tmp_path, found) / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_start|>"}))
    with pytest.raises(ValidationError, match="reads other special tokens"):
        prove(tmp_path, found)


QWEN2 = {"normalizer": {"type": "NFC"}, "pre_tokenizer": SPLITS["qwen"]}


def shape_of(name: str) -> DecoderConfig:
    fields = hf_fields(hf_model(name))
    return family_of_hf(fields).config_from_hf(fields)


@pytest.mark.parametrize(
    ("family", "own"),
    [(each, own) for each in FAMILIES for own in (True, False) if own or "qwen" in each.name],
)
def test_transformers_gives_the_same_ids_beside_the_config_of_each_family_that_is_written(
    tiny_tokenizer: Path, tmp_path: Path, family: Family, own: bool
) -> None:
    data = variant_of(tiny_tokenizer.read_bytes(), **({} if own else QWEN2))
    chosen, _ = family_to_export(shape_of(family.name), data)
    assert chosen.name == ("llama" if own and family.name == "qwen2" else family.name)
    found = made(data)
    assert len(prove(written(tmp_path, found, chosen.model_type), found)) == 2


@pytest.mark.skipif(OLD, reason="transformers 4 reads its tokenizer.json")
def test_a_qwen_2_with_another_tokenizer_is_no_qwen_2(tiny_tokenizer: Path, tmp_path: Path) -> None:
    data = tiny_tokenizer.read_bytes()
    found = made(data)
    with pytest.raises(ValidationError, match="other ids than the tokenizer"):
        prove(written(tmp_path, found, "qwen2"), found)
    windows = shape_of("qwen2 windows of late layers")
    family, shape = family_to_export(windows, data)
    assert (family.name, shape.windows) == ("smollm3", windows.windows)
    assert family_to_export(windows, None)[0].name == "qwen2"
