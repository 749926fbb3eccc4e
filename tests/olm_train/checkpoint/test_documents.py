"""Documents of a checkpoint: train.json gives back what was put in, paths count from the run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from olm_data.bounded_json import MalformedJson
from olm_data.config.hints import FilePath
from olm_train.checkpoint.documents import RunOrigin, RunState, default_work_dir, saved_config
from olm_train.optim.state import OptimizerRecord, SpelledFloat

STATE = RunState(
    optimizer=OptimizerRecord(
        class_name="torch.optim.SGD", groups=[{"on": True, "t": SpelledFloat("inf")}]
    ),
    step=3,
    max_steps=9,
    global_batch_size=64,
    world_size=2,
    data_loader={"rows_consumed": 12},
    callbacks={"mine": {"last": 3}},
    origin=RunOrigin("../other/step00000001", 1, "ab"),
)


def test_train_json_comes_back_as_it_was_written() -> None:
    value = json.loads(STATE.encode())
    assert value["optimizer"]["groups"] == [{"on": True, "t": {"float": "inf"}}]
    assert RunState.of(value) == STATE
    assert math.isinf(float(RunState.of(value).optimizer.groups[0]["t"].float))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "change",
    [
        {"step": "3"},
        {"max_steps": -1},
        {"callbacks": [1]},
        {"optimizer": {"class": "x", "groups": [{"t": {"float": "1e400"}}]}},
        {"optimizer": {"class": "x", "groups": [{"t": [1, 2]}]}},
    ],
    ids=str,
)
def test_what_no_trainer_writes_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(MalformedJson):
        RunState.of(msgspec.to_builtins(STATE) | change)


CACHE = FilePath("/elsewhere/cache")


@dataclass(frozen=True)
class Section:
    cache: FilePath = CACHE
    lock: FilePath | None = None
    sets: dict[str, FilePath] = field(default_factory=dict)


@dataclass(frozen=True)
class Whole:
    name: str
    data: Section


def test_local_paths_are_saved_from_the_runs_folder_and_urls_stay(tmp_path: Path) -> None:
    lock, remote = FilePath(str(tmp_path / "lock.json")), FilePath("s3://bucket/set")
    config = Whole("a", Section(lock=lock, sets={"here": lock, "there": remote}))
    run = tmp_path / "runs/first"
    saved = saved_config(config, str(run))
    assert saved == {
        "name": "a",
        "data": {
            "cache": "/elsewhere/cache",
            "lock": "../../lock.json",
            "sets": {"here": "../../lock.json", "there": "s3://bucket/set"},
        },
    }
    assert saved_config(config, "s3://bucket/run")["data"]["lock"] == lock


def test_the_logs_of_a_remote_run_lie_in_the_users_cache() -> None:
    assert default_work_dir("runs/first") == "runs/first"
    assert default_work_dir("s3://bucket/run").endswith(".cache/olm/runs/bucket/run")
