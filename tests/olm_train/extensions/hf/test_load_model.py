"""`load_model` of what transformers wrote: folder, bucket, hub; a model to train or to ask."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import pytest
import torch
from support.auto_runs import LENGTH
from support.hf_models import hf_model
from support.hub_stub import HubStub
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, TensorDataset

import olm_train
from olm_data.errors import InputError, ValidationError
from olm_data.storage.store import Store
from olm_train import AutoTrainer, Decoder, DecoderConfig, init_parameters, load_model


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
    return found


def same(one: Decoder, other: Decoder) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return one.config == other.config and all(torch.equal(a, b) for a, b in pairs)


@torch.no_grad()
def test_logits_are_those_of_transformers(folder: Path) -> None:
    model = model_at(folder)
    assert not model.training
    ids = torch.randint(0, 61, (1, 30), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(ids), hf_model("llama")(ids).logits, atol=1e-4, rtol=1e-4)


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
