"""Whole checkpoints that contradict themselves, as whoever writes there can make them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.runs import build_trainer, metrics
from support.seal import seal

from olm_data.errors import ConflictError, ValidationError
from olm_train.checkpoint.load import open_checkpoint
from olm_train.distributed.world import World

EVERY_2 = "--trainer.callbacks.checkpointer.save_interval=2"


def train(lock: Path, folder: Path, stop: int) -> None:
    build_trainer(lock, folder, EVERY_2, stop=stop, quiet=True).fit()


@pytest.fixture(scope="module")
def saved(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("s1") / "run"
    train(tiny_mixture, folder, 4)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


@pytest.mark.parametrize("name", ["step00000004", "step00000006"])
def test_a_checkpoint_under_another_steps_name_is_not_gone_on_from_and_not_removed(
    name: str, run: Path, tiny_mixture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "step00000004")
    shutil.copytree(run / "step00000002", run / name)
    with pytest.raises(ConflictError, match="of another step lies where") as error:
        train(tiny_mixture, run, 8)
    assert "name it step00000002" in str(error.value)
    assert f"warning: the folder {name} holds the checkpoint of step 2" in capsys.readouterr().err
    assert metrics(run)[-1]["step"] == int(name[-1])
    shutil.move(run / name, run.parent / "elsewhere")
    train(tiny_mixture, run, 8)
    assert open_checkpoint(run / "step00000008", World()).step == 8
    assert open_checkpoint(run.parent / "elsewhere", World()).step == 2


def change_state(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "train.json"
    value = json.loads(path.read_bytes())
    for name, change in changes.items():
        (value if name in value else value["data_loader"])[name] = change
    path.write_text(json.dumps(value))
    seal(checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 3}, "is of step 3, its checkpoint of step 4"),
        ({"step": -1}, "is of step -1"),
        ({"rows_consumed": 16}, "the position in its data of step 2"),
        ({"rows_consumed": 40}, "the position in its data of step 5"),
    ],
)
def test_step_and_position_in_the_data_must_be_those_of_the_checkpoint(
    changes: dict[str, Any], message: str, run: Path, tiny_mixture: Path
) -> None:
    change_state(run / "step00000004", **changes)
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ValidationError, match=message):
        train(tiny_mixture, run, 8)
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_bytes_of_another_kind_of_number_are_not_taken_for_weights(
    dtype: str, run: Path, tiny_mixture: Path
) -> None:
    path = run / "step00000004/model_and_optim/index.json"
    index = json.loads(path.read_bytes())
    index["tensors"]["model.norm.weight"]["dtype"] = dtype
    path.write_bytes(msgspec.json.encode(index, order="sorted") + b"\n")
    seal(run / "step00000004")
    with pytest.raises(ValidationError) as error:
        train(tiny_mixture, run, 8)
    assert f"model.norm.weight is of {dtype}, here of float32" in str(error.value)
