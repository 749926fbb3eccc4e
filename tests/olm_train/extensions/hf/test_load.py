"""Weights of transformers in our parameters, block by block, and `load_model` of any place."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.auto_runs import LENGTH
from support.frozen_hf_models import FROZEN, TOKENS
from support.frozen_hf_models import MODELS as FAMILY_FOLDERS
from support.hf_models import MODELS, hf_model
from support.hub_stub import HubStub
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import olm_train
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.storage.store import Store
from olm_train import AutoTrainer, DecoderConfig, init_parameters, load_model
from olm_train.extensions.hf.load import fill, open_model
from olm_train.extensions.hf.table import FAMILIES, family_of_hf
from olm_train.extensions.hf.tensors import TensorMap, TensorPart
from olm_train.model.decoder import Decoder, build_decoder

MAP = TensorMap(
    "w", (11, 3), (TensorPart("q", (4, 3), 0, 4), TensorPart("k", (3, 2), 4, 2, transposed=True),
                   TensorPart("v", (2, 3), 6, 2)),
)  # fmt: skip


"""Eight rows of parts, and three that pad."""


THEIRS = {part.name: torch.randn(part.shape) for part in MAP.parts}


WHOLE = torch.cat((THEIRS["q"], THEIRS["k"].T, THEIRS["v"], torch.zeros(3, 3)))


def read(name: str, block: tuple[slice, ...]) -> Tensor:
    return THEIRS[name][block]


@given(
    st.tuples(st.integers(0, 11), st.integers(0, 11)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_any_block_is_that_of_the_whole(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    where = (slice(*rows), slice(*columns))
    block = MAP.from_theirs(read, where, dtype=torch.float32)
    assert torch.equal(block, WHOLE[where])
    elements = sum(
        (s.source[0].stop - s.source[0].start) * (s.source[1].stop - s.source[1].start)
        for s in MAP.reads(where)
    )
    assert elements == WHOLE[:8][where].numel()


def test_the_whole_gives_their_tensors_back() -> None:
    whole = MAP.from_theirs(read, dtype=torch.float32)
    back = {part.name: part.of(whole[part.ours]) for part in MAP.parts}
    assert all(
        torch.equal(back[name], value) and back[name].is_contiguous()
        for name, value in THEIRS.items()
    )


EXPERTS = TensorMap(
    "experts", (4, 6, 3), tuple(
        TensorPart(f"{expert}.{name}", (3, 3), expert, 1, within=slice(first, first + 3))
        for expert in range(4)
        for name, first in (("gate", 0), ("up", 3))
    ),
)  # fmt: skip


APART = {part.name: torch.randn(part.shape) for part in EXPERTS.parts}


STACKED = torch.stack([torch.cat((APART[f"{n}.gate"], APART[f"{n}.up"])) for n in range(4)])


@given(st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)) for n in EXPERTS.shape)))
def test_any_block_of_experts_is_read_from_those_experts_alone(
    bounds: tuple[tuple[int, int], ...],
) -> None:
    where = tuple(slice(*each) for each in bounds)
    read_elements = 0

    def read_one(name: str, block: tuple[slice, ...]) -> Tensor:
        nonlocal read_elements
        read_elements += APART[name][block].numel()
        return APART[name][block]

    block = EXPERTS.from_theirs(read_one, where, dtype=torch.float32)
    assert torch.equal(block, STACKED[where])
    assert read_elements == block.numel()


def test_experts_give_their_tensors_back() -> None:
    back = {part.name: part.of(STACKED[part.ours]) for part in EXPERTS.parts}
    assert back.keys() == APART.keys()
    assert all(torch.equal(back[name], value) for name, value in APART.items())


def saved(folder: Path, name: str = "llama") -> Path:
    hf_model(name).save_pretrained(folder)
    return folder


def filled(folder: Path, **changes: int) -> tuple[Decoder, list[str]]:
    opened = open_model(str(folder))
    config = DecoderConfig(**{**vars(opened.config), **changes})
    model = build_decoder(config)
    said, _ = fill(opened, dict(model.named_parameters()), config)
    return model, said


def change(folder: Path, **tensors: Tensor | None) -> None:
    path = folder / "model.safetensors"
    kept = {
        **load_file(path),
        **{name.replace("__", "."): value for name, value in tensors.items()},
    }
    save_file({n: v for n, v in kept.items() if v is not None}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", sorted(MODELS))
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = hf_model(name)
    theirs.save_pretrained(tmp_path)
    ours, _ = filled(tmp_path)
    ids = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_tied_head_that_is_stored_once_more_must_be_the_table(tmp_path: Path) -> None:
    saved(tmp_path, "llama tied, one kv head")
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, lm_head__weight=table.clone())
    assert any("lm_head.weight" in line for line in filled(tmp_path)[1])
    other = table.clone()
    other[-1, -1] += 1
    for head in (other, table[:-1]):
        change(tmp_path, lm_head__weight=head.clone())
        with pytest.raises(ValidationError, match=r"lm_head\.weight is not model\.embed_tokens"):
            filled(tmp_path)


def test_a_tensor_too_many_and_one_too_few_are_named(tmp_path: Path) -> None:
    saved(tmp_path)
    change(tmp_path, model__extra__weight=torch.zeros(3))
    with pytest.raises(InputError, match=r"of no parameter \(model\.extra\.weight"):
        filled(tmp_path)
    change(tmp_path, model__extra__weight=None, model__norm__weight=None)
    with pytest.raises(InputError, match=r"missing \(model\.norm\.weight"):
        filled(tmp_path)


def test_tensors_that_follow_from_others_are_counted_and_said(tmp_path: Path) -> None:
    saved(tmp_path)
    change(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))
    _, said = filled(tmp_path)
    assert said[0].startswith("1 tensors are not needed, as they follow from the others: model.")


@pytest.mark.parametrize("shape", [(31,), (33,), (32, 1)])
def test_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    saved(tmp_path)
    change(tmp_path, model__norm__weight=torch.zeros(shape))
    with pytest.raises(ValidationError, match=r"model\.norm\.weight is \[3"):
        filled(tmp_path)


def test_weights_in_bfloat16_are_cast_and_it_is_said(tmp_path: Path) -> None:
    theirs = hf_model("llama").bfloat16()
    theirs.save_pretrained(tmp_path)
    model, said = filled(tmp_path)
    assert "cast from bfloat16 to float32" in said
    assert torch.equal(model.lm_head.weight, theirs.lm_head.weight.float())


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    change(tmp_path, model__norm__weight=torch.zeros(32, dtype=torch.int8))
    with pytest.raises(InputError, match="I8, which are quantised"):
        filled(tmp_path)


def test_padding_of_the_vocabulary_is_zeros_and_new_rows_are_the_mean(tmp_path: Path) -> None:
    saved(tmp_path)
    model, said = filled(tmp_path, vocab_size=70, vocab_multiple=16)
    table = model.embeddings.weight.detach()
    assert table.shape[0] == 80
    torch.testing.assert_close(table[61:70], table[:61].mean(0).expand(9, -1))
    assert not table[70:].any()
    assert "9 new ids, 61 to 69: their rows begin as the mean of the old ones" in said


def test_the_vocabulary_is_kept_or_extended(tmp_path: Path) -> None:
    opened = open_model(str(saved(tmp_path)))
    assert opened.vocabulary_size(50, "keep") == 61
    assert opened.vocabulary_size(50, "extend") == 61
    assert opened.vocabulary_size(65, "extend") == 65
    with pytest.raises(UsageError, match="the data has 65 ids, and the model knows 61"):
        opened.vocabulary_size(65, "keep")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of transformers in several files, without a tokenizer."""
    place = tmp_path_factory.mktemp("loaded") / "llama"
    hf_model("llama").save_pretrained(place, max_shard_size="20KB")
    assert len(list(place.glob("*.safetensors"))) > 1
    return place


def model_at(place: Path | str) -> Decoder:
    found = load_model(place)
    assert isinstance(found, Decoder)
    assert not found.training
    return found


def same(one: Decoder, other: Decoder) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return one.config == other.config and all(torch.equal(a, b) for a, b in pairs)


def test_a_bucket_and_the_hub_give_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Path
) -> None:
    from huggingface_hub import constants

    near, bucket = model_at(folder), Store(f"memory://{uuid.uuid4().hex}/llama")
    for path in folder.iterdir():
        bucket.put(path.name, path.read_bytes())
    assert same(model_at(bucket.root), near)
    (tmp_path / "hub/models/lab").mkdir(parents=True)
    shutil.copytree(folder, tmp_path / "hub/models/lab/llama")
    shutil.copy(tiny_tokenizer, tmp_path / "hub/models/lab/llama/tokenizer.json")
    with HubStub(tmp_path / "hub").running() as stub:
        for name, value in stub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home/hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        found = load_model("hf://lab/llama")
    assert isinstance(found, tuple)
    assert same(found[0], near)
    assert isinstance(found[1], Tokenizer)


def test_dtypes_stay_and_several_become_float32(tmp_path: Path) -> None:
    theirs = hf_model("llama").bfloat16()
    theirs.save_pretrained(tmp_path / "half")
    model = model_at(tmp_path / "half")
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.norm.weight, theirs.model.norm.weight)
    theirs.model.norm.float()
    theirs.save_pretrained(tmp_path / "mixed")
    assert {each.dtype for each in model_at(tmp_path / "mixed").parameters()} == {torch.float32}


def test_auto_trainer_begins_with_it(folder: Path, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 61, (8, LENGTH + 1), generator=draw)
    run = AutoTrainer(
        model_at(folder), torch.optim.AdamW, DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), 8),
        context_length=LENGTH, device="cpu", use_amp=False, save_folder=tmp_path / "run",
    )  # fmt: skip
    with torch.no_grad():
        logits = hf_model("llama")(ids[:, :-1]).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert run.train(epochs=1)[0] == pytest.approx(wanted.item(), abs=2e-5)


def test_our_own_format_comes_back_by_the_same_name(tmp_path: Path) -> None:
    model = Decoder(DecoderConfig(d_model=8, n_layers=1, n_heads=2, vocab_size=10))
    init_parameters(model, 1)
    model.save(tmp_path / "own")
    found = olm_train.load_model(tmp_path / "own")
    assert isinstance(found, Decoder)
    assert same(found, model)


def test_a_shape_larger_than_the_files_takes_no_memory(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "large")
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"hidden_size": 1 << 17, "intermediate_size": 1 << 18}
    (tmp_path / "large/config.json").write_text(json.dumps(fields))
    with pytest.raises(ValidationError, match="other shapes than the config"):
        load_model(tmp_path / "large")
    (tmp_path / "large/config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(InputError, match="model_type mamba is not one"):
        load_model(tmp_path / "large")


LARGEST = 40_000  # bytes of a folder


def test_each_family_has_one() -> None:
    assert set(FAMILY_FOLDERS) == {family.name for family in FAMILIES}
    for name in FAMILY_FOLDERS:
        files = list((FROZEN / name).iterdir())
        wanted = {"config.json", "expected.json", "model.safetensors"}
        assert {path.name for path in files} == wanted
        assert sum(path.stat().st_size for path in files) < LARGEST


@pytest.mark.parametrize("name", FAMILY_FOLDERS)
@torch.no_grad()
def test_logits_are_those_that_transformers_gave(name: str) -> None:
    folder = FROZEN / name
    fields, expected = (
        json.loads((folder / file).read_text()) for file in ("config.json", "expected.json")
    )
    tensors = load_file(folder / "model.safetensors")
    family = family_of_hf(fields)
    config = family.config_from_hf(fields)
    model, stored = Decoder(config), family.stored_names(config, tensors)
    parameters = dict(model.named_parameters())
    back = {}
    for each in family.tensors(config):
        target = parameters[each.ours].data
        each.fill(target, lambda theirs, block: tensors[stored[theirs]][block])
        back |= {part.name: part.of(target.bfloat16()[part.ours]) for part in each.parts}
    assert back.keys() == tensors.keys()
    assert all(torch.equal(value, back[key]) for key, value in tensors.items())
    logits = model(torch.tensor([expected["ids"]]))[0]
    assert logits.shape == (TOKENS, config.vocab_size)
    torch.testing.assert_close(logits, torch.tensor(expected["logits"]), atol=1e-5, rtol=1e-5)
