"""Files of transformers where they lie: told from ours, read in part, false ones refused."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.hub_commits import COMMIT
from support.hub_stub import HubStub

from olm_data.errors import InputError, StorageError, UsageError, ValidationError
from olm_data.storage.store import Store
from olm_train.extensions.hf import weights as ranged
from olm_train.extensions.hf.source import (
    fetch,
    is_transformers,
    pinned,
    read_fields,
    read_tokenizer,
    weight_files,
)
from olm_train.extensions.hf.weights import RangedFile, SafeTensors
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


NAME = "model.safetensors"


@pytest.fixture
def store() -> Store:
    return Store(f"memory://{uuid.uuid4().hex}/m")


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def test_every_block_is_that_of_the_library(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranged, "PIECE", 50)  # a row or two
    draw = torch.Generator().manual_seed(1)
    tensors = {
        "one": torch.randn(13, 7, generator=draw),
        "half": torch.randn(13, 7, generator=draw).bfloat16(),
        "vector": torch.randn(41, generator=draw).half(),
        "cube": torch.randn(3, 4, 5, generator=draw).double(),
        "none": torch.zeros(0, 7),
        "scalar": torch.tensor(2.5),
    }
    save_file(tensors, tmp_path / NAME, metadata={"format": "pt"})
    store.put(NAME, (tmp_path / NAME).read_bytes())
    file = RangedFile(store, NAME)
    with safe_open(tmp_path / NAME, framework="pt") as wanted:
        assert set(file.keys()) == set(wanted.keys())
        for name, tensor in tensors.items():
            theirs, ours = wanted.get_slice(name), file.get_slice(name)
            assert ours.get_dtype() == theirs.get_dtype()
            assert ours.get_shape() == theirs.get_shape()
            for first, last in ((0.0, 1.0), (0.3, 0.8), (0.5, 0.5), (0.9, 1.0)):
                where = tuple(slice(int(first * n), int(last * n)) for n in tensor.shape)
                assert torch.equal(ours[where], tensor[where]), (name, where)


def test_no_more_is_read_than_the_rows_of_the_block(store: Store, tmp_path: Path) -> None:
    save_file({"one": torch.zeros(1000, 10)}, tmp_path / NAME)
    store.put(NAME, (tmp_path / NAME).read_bytes())
    with SafeTensors(store.root, [NAME]) as files:
        files.read("one", (slice(10, 30), slice(0, 10)))
        assert files.read_bytes == 20 * 10 * 4
        files.read("one", (slice(0, 5), slice(0, 1)))
        assert files.read_bytes == 25 * 10 * 4
        assert files.bytes == 40_000
    with pytest.raises(InputError, match="no such file"), SafeTensors(store.root, ["no"]):
        pass


def test_a_file_that_is_replaced_meanwhile_is_refused(store: Store, tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        save_file({"one": torch.full((4, 4), value)}, tmp_path / NAME)
        store.put(NAME, (tmp_path / NAME).read_bytes())
        if value == 1.0:
            file = RangedFile(store, NAME)
    with pytest.raises(ValidationError, match="replaced or removed while it was read"):
        file.get_slice("one")[slice(0, 4), slice(0, 4)]
    file = RangedFile(store, NAME)
    store.delete(NAME)
    with pytest.raises(ValidationError, match="replaced or removed while it was read"):
        file.get_slice("one")[slice(0, 4), slice(0, 4)]


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


EIGHT = b"\0" * 8


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0",
        EIGHT,
        raw({"a": GOOD}, EIGHT, length=1 << 62),
        raw({"a": GOOD}, EIGHT, length=10_000),
        raw({"a": GOOD}, EIGHT[1:]),
        raw({"a": GOOD}, EIGHT + b"\0"),
        raw({"a": {**GOOD, "data_offsets": [0, 16]}}, EIGHT * 2),
        raw({"a": {**GOOD, "data_offsets": [8, 16]}}, EIGHT * 2),
        raw({"a": {**GOOD, "data_offsets": [8, 0]}}, EIGHT),
        raw({"a": {**GOOD, "shape": [-2]}}, EIGHT),
        raw({"a": {**GOOD, "shape": [1 << 40, 1 << 40]}}, EIGHT),
        raw({"a": GOOD, "b": GOOD}, EIGHT),
        raw({"a": {**GOOD, "dtype": "F4X"}, "b": GOOD}, EIGHT),
        raw({"a": {"dtype": "F32"}}, EIGHT),
        raw([1], EIGHT),
        raw(b'{"a": ' * 200, EIGHT),
        raw(b'{"a": 1, "a": 2}', EIGHT),
        raw(b"\xff" * 40, EIGHT),
    ],
)
def test_a_false_header_is_refused(store: Store, data: bytes) -> None:
    store.put(NAME, data)
    with pytest.raises(ValidationError, match="the weights are damaged"):
        RangedFile(store, NAME)


def test_a_header_larger_than_any_is_not_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranged, "MOST_HEADER", 100)
    store.put(NAME, raw({"a": GOOD, "__metadata__": {"x": "y" * 100}}, EIGHT))
    with pytest.raises(ValidationError, match="its header would have"):
        RangedFile(store, NAME)


def test_blocks_names_and_counts(tmp_path: Path) -> None:
    one = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    save_file({"one": one}, tmp_path / "a.safetensors")
    save_file({"two": one.to(torch.bfloat16)}, tmp_path / "b.safetensors")
    with SafeTensors(str(tmp_path), ["a.safetensors", "b.safetensors"]) as files:
        assert files.names == {"one", "two"}
        assert sorted(files.dtypes) == ["BF16", "F32"]
        assert files.bytes == 24 * 4 + 24 * 2
        assert torch.equal(files.read("one", (slice(1, 3), slice(0, 2))), one[1:3, :2])
        assert files.read_bytes == 16
        assert files.shape("two") == (4, 6)


def test_damaged_and_doubled_files(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 100)
    with (
        pytest.raises(ValidationError, match="damaged"),
        SafeTensors(str(tmp_path), ["a.safetensors"]),
    ):
        pass
    for name in ("b", "c"):
        save_file({"same": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with (
        pytest.raises(ValidationError, match="two files hold a tensor same"),
        SafeTensors(str(tmp_path), ["b.safetensors", "c.safetensors"]),
    ):
        pass
