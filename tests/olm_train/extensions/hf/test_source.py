"""A model of transformers where it lies: told from ours, pickles refused, names kept inside."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.hub_commits import COMMIT
from support.hub_stub import HubStub

from olm_data.errors import InputError, StorageError, UsageError, ValidationError
from olm_train.extensions.hf.source import (
    fetch,
    is_transformers,
    pinned,
    read_fields,
    read_tokenizer,
    weight_files,
)
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import build_decoder


def write(folder: Path, **files: object) -> str:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(data)
    return str(folder)


def test_told_from_our_own_exports_exactly(tmp_path: Path) -> None:
    config = DecoderConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=20)
    build_decoder(config).save(tmp_path / "ours")
    assert not is_transformers(str(tmp_path / "ours"))
    assert not is_transformers(str(tmp_path / "none"))
    assert not is_transformers(str(tmp_path / "ours" / "model.safetensors"))
    assert not is_transformers(write(tmp_path / "run", config__json={"model": {}, "trainer": {}}))
    assert is_transformers(write(tmp_path / "theirs", config__json={"model_type": "llama"}))
    assert is_transformers("hf://lab/model")


def test_a_folder_of_links_is_one_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    blob = write(tmp_path / "blobs", a=json.dumps({"model_type": "llama"}))
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/config.json").symlink_to(f"{blob}/a")
    place = str(tmp_path / "snapshot")
    assert is_transformers(place)
    assert is_transformers(f"{place}/")
    assert read_fields(place) == {"model_type": "llama"}


def test_offline_the_cache_of_the_hub_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants, snapshot_download

    (tmp_path / "hub/models/lab").mkdir(parents=True)
    write(tmp_path / "hub/models/lab/m", config__json={}, model__safetensors="")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home/hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with HubStub(tmp_path / "hub").running() as stub:
        for name, value in stub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        snapshot_download("lab/m", endpoint=stub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    place = pinned("hf://lab/m")
    assert place == f"hf://lab/m@{COMMIT}"
    assert (read_tokenizer(place), weight_files(place)) == (None, ["model.safetensors"])
    assert Path(fetch(place)).name == COMMIT
    (Path(fetch(place)) / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no model\.safetensors or") as refused:
        fetch(place)
    assert "HF_HUB_OFFLINE" in (refused.value.why or "")
    with pytest.raises(StorageError, match="told to stay offline"):
        pinned("hf://lab/other")


def test_a_folder_is_pinned_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pinned("llama") == str(tmp_path / "llama")
    commit = f"hf://lab/model@{'0' * 40}"
    assert pinned(commit) == commit  # asks nobody
    with pytest.raises(UsageError, match="dataset, not of a model"):
        pinned("hf://datasets/lab/books")


def test_pickles_are_refused_with_advice(tmp_path: Path) -> None:
    place = write(tmp_path / "m", config__json={"model_type": "llama"}, pytorch_model__bin="")
    with pytest.raises(InputError, match=r"pytorch_model\.bin is a pickle") as refused:
        fetch(place)
    assert "safetensors" in (refused.value.fix or "")
    with pytest.raises(InputError, match="no weights as safetensors"):
        fetch(write(tmp_path / "n", config__json={"model_type": "llama"}))


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        read_fields(write(tmp_path / "m"))
    with pytest.raises(ValidationError, match="malformed"):
        read_fields(write(tmp_path / "n", config__json="[1"))


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x"])
def test_an_index_names_files_of_its_folder_alone(tmp_path: Path, name: str) -> None:
    place = write(
        tmp_path / "m",
        config__json={"model_type": "llama"},
        model__safetensors__index__json={"weight_map": {"a": name}},
    )
    with pytest.raises(ValidationError):
        weight_files(place)


def test_a_file_of_the_index_that_is_missing_is_named(tmp_path: Path) -> None:
    place = write(
        tmp_path / "m",
        config__json={"model_type": "llama"},
        model__safetensors__index__json={"weight_map": {"a": "x.safetensors"}},
    )
    with pytest.raises(InputError, match=r"no x\.safetensors"):
        fetch(place)


def test_no_pipe_is_opened(tmp_path: Path) -> None:
    place = write(tmp_path / "m", config__json={"model_type": "llama"})
    os.mkfifo(tmp_path / "m" / "model.safetensors")
    with pytest.raises(ValidationError, match="named pipe"):
        fetch(place)
