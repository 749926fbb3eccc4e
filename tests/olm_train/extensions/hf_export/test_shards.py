"""safetensors files written tensor by tensor are those that the library would have written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from olm_data.errors import UsageError, ValidationError
from olm_train.checkpoint.tensors import Box
from olm_train.extensions.hf_export.job import parse_size, rounded
from olm_train.extensions.hf_export.shards import (
    METADATA,
    MODEL,
    WeightsFile,
    index_of,
    plan,
    refuse_other,
    write_shard,
)

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
