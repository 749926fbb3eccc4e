"""Blocks of tensors in files: the slices that are asked for, counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from olm_data.errors import ValidationError
from olm_train.extensions.hf.weights import SafeTensors


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
