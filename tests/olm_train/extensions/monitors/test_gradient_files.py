from __future__ import annotations

from pathlib import Path

import pytest
import torch

from olm_data.errors import InputError, ValidationError
from olm_train.checkpoint.manifest import INDEX_NAME
from olm_train.checkpoint.tensors import Index
from olm_train.distributed.world import World
from olm_train.extensions.monitors.gradient_files import (
    read_gradients,
    step_folder,
    write_gradients,
)

GRADIENTS = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "scalar": torch.tensor(2.0),
    "b": torch.ones(5, dtype=torch.bfloat16),
}


def test_gradients_come_back_with_their_shapes_and_types(tmp_path: Path) -> None:
    folder = write_gradients(tmp_path, 12, GRADIENTS, World(), None)
    assert folder == step_folder(tmp_path, 12) == tmp_path / "gradients/step00000012"
    assert sorted(p.name for p in folder.iterdir()) == [INDEX_NAME, "rank00000.safetensors"]
    found = read_gradients(folder)
    assert found.keys() == GRADIENTS.keys()
    for name, gradient in GRADIENTS.items():
        assert torch.equal(found[name], gradient)
        assert found[name].dtype == gradient.dtype
    index = Index.decode((folder / INDEX_NAME).read_bytes(), "index")
    assert index.values == {"step": 12, "first_n": None}


def test_the_first_entries_of_each_dimension_are_kept(tmp_path: Path) -> None:
    found = read_gradients(write_gradients(tmp_path, 1, GRADIENTS, World(), 2))
    assert torch.equal(found["a.weight"], GRADIENTS["a.weight"][:2, :2])
    assert found["b"].shape == (2,)


def test_a_second_attempt_at_a_step_replaces_the_first(tmp_path: Path) -> None:
    folder = write_gradients(tmp_path, 1, GRADIENTS, World(), None)
    (folder / "rank00007.safetensors").write_bytes(b"of more ranks")
    write_gradients(tmp_path, 1, {"b": GRADIENTS["b"]}, World(), None)
    assert sorted(p.name for p in folder.iterdir()) == [INDEX_NAME, "rank00000.safetensors"]
    assert list(read_gradients(folder)) == ["b"]


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    folder = write_gradients(tmp_path, 1, GRADIENTS, World(), None)
    index, path = folder / INDEX_NAME, folder / "rank00000.safetensors"
    whole, data = index.read_bytes(), path.read_bytes()
    index.unlink()
    with pytest.raises(InputError, match="not written to the end"):
        read_gradients(folder)
    for wrong in (
        whole.replace(b'"version":1', b'"version":9'),
        b"[]",
        whole.replace(b"rank00000", b"rank00001"),
        whole.replace(b"[5]", b"[6]"),
    ):
        index.write_bytes(wrong)
        with pytest.raises(ValidationError, match="index of the tensors is damaged"):
            read_gradients(folder)
    index.write_bytes(whole)
    path.write_bytes(data[:40])
    with pytest.raises(ValidationError, match="beyond the end"):
        read_gradients(folder)
