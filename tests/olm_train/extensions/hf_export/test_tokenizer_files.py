"""The files of an export: those of tensors as the library writes them, those of the tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from support.hf_models import OLD, hf_fields, hf_model
from support.tokenizer_kinds import SPLITS, added, bpe, unigram, variant_of, word_piece

from olm_data.dataset.tokenizer import TokenizerRules
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.tokenizer.tokenizer import spec_from_bytes
from olm_train.checkpoint.tensors import Box
from olm_train.extensions.hf.table import FAMILIES, Family, family_of_hf
from olm_train.extensions.hf_export.job import family_to_export, parse_size, rounded
from olm_train.extensions.hf_export.shards import (
    METADATA,
    MODEL,
    WeightsFile,
    index_of,
    plan,
    refuse_other,
    write_shard,
)
from olm_train.extensions.hf_export.tokenizer_files import TokenizerFiles, prove, tokenizer_files
from olm_train.model.config import DecoderConfig

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.arange(5).to(torch.bfloat16),
    "c": torch.tensor([[1.5]], dtype=torch.float16),
}


PLANNED = [Box(name, value.dtype, tuple(value.shape)) for name, value in TENSORS.items()]


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    (shard,) = plan(PLANNED, 1 << 20)
    written = write_shard(tmp_path, shard, iter(TENSORS.values()))
    found = load_file(tmp_path / MODEL)
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert torch.equal(found[name], value)
        assert found[name].dtype == value.dtype
    with safe_open(tmp_path / MODEL, framework="pt") as file:
        assert file.metadata() == METADATA == {"format": "pt"}
    refuse_other(tmp_path, shard, written)
    assert int.from_bytes((tmp_path / MODEL).read_bytes()[:8], "little") % 8 == 0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 200))
def test_a_file_holds_no_more_than_asked_for_but_a_single_larger_tensor(
    sizes: list[int], most: int
) -> None:
    tensors = [Box(f"t{n}", torch.float32, (size,)) for n, size in enumerate(sizes)]
    shards = plan(tensors, most)
    assert [each for shard in shards for each in shard.tensors] == tensors
    for number, shard in enumerate(shards, 1):
        size = sum(each.bytes for each in shard.tensors)
        assert size <= most or len(shard.tensors) == 1
        wanted = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        assert shard.file == (MODEL if len(shards) == 1 else wanted)


def test_the_index_names_each_tensor_and_counts() -> None:
    shards = plan(PLANNED, 24)
    data = index_of(shards, 12)
    assert data is not None
    index = json.loads(data)
    assert index["metadata"] == {"total_parameters": 12, "total_size": 36}
    assert index["weight_map"] == {
        "a.weight": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    assert index_of(plan(PLANNED, 100), 12) is None


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    (shard,) = plan(PLANNED, 1 << 20)
    written = write_shard(tmp_path, shard, iter(TENSORS.values()))
    path = tmp_path / MODEL
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValidationError, match="c read back as other bytes"):
        refuse_other(tmp_path, shard, written)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (shard,) = plan(PLANNED, 1 << 20)
    written = write_shard(tmp_path, shard, iter(TENSORS.values()))
    with pytest.raises(ValidationError, match="holds other tensors"):
        refuse_other(tmp_path, WeightsFile(MODEL, shard.tensors[:2]), written)
    other = Box("c", torch.float16, (1,))
    with pytest.raises(ValidationError, match="c was written otherwise"):
        refuse_other(tmp_path, WeightsFile(MODEL, (*shard.tensors[:2], other)), written)
    (tmp_path / MODEL).write_bytes(b"no such file")
    with pytest.raises(ValidationError, match="no safetensors file"):
        refuse_other(tmp_path, shard, written)


def test_weights_that_are_not_finite_in_the_dtype_are_refused() -> None:
    large = torch.tensor([1.0, 70_000.0])
    with pytest.raises(ValidationError, match="1 weights of w are not finite any more"):
        rounded(large, Box("w", torch.float16, (2,)))
    with pytest.raises(ValidationError, match="1 weights of w are not finite"):
        rounded(torch.tensor([1.0, torch.nan]), Box("w", torch.float32, (2,)))
    assert rounded(large, Box("w", torch.bfloat16, (2,))).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500 MB", 5 * 10**8), ("1GiB", 1 << 30), ("70", 70)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5", "0GB", "GB", "5TBs", "-1GB", "1e400"][2:])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


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
