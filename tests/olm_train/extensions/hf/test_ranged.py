"""Safetensors files: any block, few bytes, one version, near or in a bucket; false ones refused."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from olm_data.errors import InputError, ValidationError
from olm_data.storage.store import Store
from olm_train.extensions.hf import weights as ranged
from olm_train.extensions.hf.weights import RangedFile, SafeTensors

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
