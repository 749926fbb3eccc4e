"""Tensors of a checkpoint: every bit comes back, on any ranks and under any strategy.

Each launch of ranks proves several promises: starting processes is what costs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.distributed import run_ranks
from support.runs import build_trainer, group_world, metrics
from support.training import digest, full

from olm_data.storage.store import Store
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import Kind
from olm_train.checkpoint.save import Contents, save_checkpoint
from olm_train.checkpoint.tensors import (
    DTYPES,
    Box,
    Chunk,
    Index,
    TensorEntry,
    TensorsFile,
    fill,
    tensors_file,
)
from olm_train.distributed.world import World


def round_trip(state: Any, empty: Any, folder: Path) -> Any:
    contents = Contents(step=1, kind=Kind.final, state=state, documents={}, lock_digest="")
    place = save_checkpoint(folder, contents, World(), work_dir=folder)
    open_checkpoint(place, World()).load_tensors(empty, World())
    return empty


def test_tensors_of_every_dtype_and_shape_come_back_bit_for_bit(tmp_path: Path) -> None:
    shapes = [(), (0,), (3, 0), (5,), (2, 3), (2, 1, 3, 2)]
    raw = torch.randint(0, 2, (12 * 16,), dtype=torch.uint8)
    state = {
        f"{name} {shape}": raw[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        for name, dtype in DTYPES.items()
        for shape in shapes
    }
    state["turned"] = torch.arange(6).reshape(2, 3).T
    empty = {name: torch.zeros_like(value) for name, value in state.items()}
    found = round_trip({"model": state}, {"model": empty}, tmp_path)["model"]
    for name, value in state.items():
        one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (value, found[name]))
        assert torch.equal(one, other), name


def test_the_library_of_the_container_opens_the_file_of_a_rank(tmp_path: Path) -> None:
    state = {"w": torch.randn(3, 2), "b": torch.ones(5, dtype=torch.bfloat16), "n": torch.tensor(7)}
    contents = Contents(
        step=1, kind=Kind.final, state={"model": state}, documents={}, lock_digest=""
    )
    place = save_checkpoint(tmp_path, contents, World(), work_dir=tmp_path)
    found = load_file(Path(place) / "model_and_optim" / tensors_file(0))
    assert found.keys() == {f"model.{name}" for name in state}
    assert all(torch.equal(found[f"model.{name}"], value) for name, value in state.items())


def test_boxes_of_one_tensor_have_names_of_their_own(tmp_path: Path) -> None:
    whole = torch.arange(12).reshape(6, 2)
    boxes = [Box("w", whole.dtype, (3, 2), (at, 0)) for at in (0, 3)]
    with TensorsFile(tmp_path / "x.safetensors", boxes) as file:
        for at in (0, 3):
            file.add(whole[at : at + 3])
    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(torch.cat([found["w"], found["w@3,0"]]), whole)


def test_a_file_of_before_without_a_header_is_read(tmp_path: Path) -> None:
    values = torch.randn(4, 3)
    (tmp_path / "rank00000.bin").write_bytes(values.numpy().tobytes())
    chunk = Chunk(0, 0, (0, 0), (4, 3))
    entry = TensorEntry(dtype="float32", shape=(4, 3), chunks=(chunk,))
    index = Index(files=("rank00000.bin",), tensors={"model.w": entry})
    index.check({"rank00000.bin": 48}, "index.json")
    found = torch.zeros(4, 3)
    fill({"model.w": found}, Store(str(tmp_path)), index)
    assert torch.equal(found, values)


VALUES = {
    "int": 3, "large": 1 << 200, "float": 0.1, "inf": -math.inf, "text": "\x1b[2J", "none": None,
    "bool": True, "bytes": b"\x00\xff", "betas": (0.9, 0.95), "list": [1, [2.5, {"a": b"x"}]],
}  # fmt: skip


def test_values_that_are_no_tensors_come_back_of_their_kind(tmp_path: Path) -> None:
    moment = torch.ones(2)
    state = {"optim": {"w": {**VALUES, "old": [moment, 5]}}}
    empty: Any = {"optim": {"w": {**dict.fromkeys(VALUES, 0), "old": [torch.zeros(2), 0]}}}
    found = round_trip(state, empty, tmp_path)["optim"]["w"]
    assert {name: found[name] for name in VALUES} == VALUES
    assert [type(found[name]) for name in VALUES] == [type(value) for value in VALUES.values()]
    assert found["old"][1] == 5
    assert torch.equal(found["old"][0], moment)


def digests(module: Any) -> list[str]:
    return [digest(part) for part in full(module).values()]


def two_runs(lock: Path, folder: Path) -> tuple[list[str], list[str], list[str]]:
    world = group_world()

    def run(name: str, stop: int) -> list[str]:
        trainer = build_trainer(
            lock,
            folder / name,
            "--trainer.callbacks.checkpointer={save_interval: 2, save_async: true}",
            "--trainer.callbacks.checkpointer.max_checkpoints=1",
            quiet=True,
            stop=stop,
            world=world,
        )
        trainer.fit()
        return digests(trainer.train_module)

    return run("whole", 5), run("stopped", 3), run("stopped", 5)


@pytest.mark.slow
def test_two_ranks_with_accumulation_resume_bit_for_bit_and_one_rank_reads_the_same(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    one, two = run_ranks(two_runs, 2, tiny_mixture, tmp_path)
    assert one == two
    whole, at_3, resumed = one
    assert resumed == whole != at_3
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "stopped")
    assert sorted(p.name for p in (tmp_path / "whole").glob("step*")) == [
        "step00000004", "step00000005",
    ]  # fmt: skip
    alone = build_trainer(tiny_mixture, tmp_path / "none").train_module
    tensors = alone.state_dict()
    open_checkpoint(tmp_path / "whole" / "step00000005", World()).load_tensors(tensors, World())
    assert digests(alone) == whole
