from __future__ import annotations

import gzip
import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import run_ranks
from support.runs import build_trainer, group_world, metrics

from olm_data.errors import UsageError
from olm_train.callbacks.base import DATA_WAIT, Callback
from olm_train.extensions.profiler.profiler import (
    ProfilerCallback,
    StepTimes,
    TraceEvent,
    step_times,
    table,
    union,
)
from olm_train.trainer import Trainer

OFF = "--trainer.callbacks.lm_evaluator.enabled=false"


def trainer_with(lock: Path, folder: Path, *given: str, **options: Any) -> Trainer:
    callbacks: dict[str, Callback] = {"profiler": ProfilerCallback(**options)} if options else {}
    return build_trainer(lock, folder, OFF, *given, callbacks=callbacks)


def stop(step: int) -> str:
    return f"--trainer.hard_stop={{value: {step}, unit: steps}}"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "profiler").glob("*"))


def trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def steps_of(events: list[dict[str, Any]]) -> set[str]:
    return {e["name"] for e in events if e.get("cat") == "user_annotation"} - {"data wait"}


def table_of(path: Path) -> list[list[str]]:
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_a_cycle_is_traced_by_the_schedule_and_told_in_a_table(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "--trainer.callbacks.profiler={skip_first: 1, wait: 1, warmup: 2, active: 2}"
    build_trainer(tiny_mixture, tmp_path, OFF, stop(9), given).fit()
    assert names(tmp_path) == ["rank00000-steps5-6.md", "rank00000-steps5-6.trace.json.gz"]
    assert "profiled steps 5 to 6: profiler/rank00000-steps5-6.md" in capsys.readouterr().err
    events = trace(tmp_path / "profiler" / "rank00000-steps5-6.trace.json.gz")
    marks = {name for name in steps_of(events) if name.startswith("ProfilerStep#")}
    assert marks == {"ProfilerStep#4", "ProfilerStep#5"}
    assert any(event["name"] == "data wait" for event in events)
    assert any(event.get("cat") == "python_function" for event in events)  # with_stack
    rows = table_of(tmp_path / "profiler" / "rank00000-steps5-6.md")
    assert [row[0] for row in rows] == ["5", "6", "share"]
    for row in rows[:2]:
        total, *parts, _ = map(float, row[1:])
        assert total > 0
        assert parts[0] > 0
        assert sum(parts) == pytest.approx(total, abs=0.03)


def test_a_cycle_is_repeated(tiny_mixture: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"wait": 0, "warmup": 1, "active": 2, "repeat": 2}
    trainer_with(tiny_mixture, tmp_path, stop(9), with_stack=False, **options).fit()
    tables = [name for name in names(tmp_path) if name.endswith(".md")]
    assert tables == ["rank00000-steps2-3.md", "rank00000-steps5-6.md"]
    events = trace(tmp_path / "profiler" / "rank00000-steps2-3.trace.json.gz")
    assert not any(event.get("cat") == "python_function" for event in events)


class Touch(Callback):
    """Asks for a cycle after a step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def post_step(self) -> None:
        if self.trainer.step == self.step:
            self.path.touch()


def test_a_cycle_is_had_on_demand(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_train.distributed.stop_file.POLL_SECONDS", 0.0)
    options: dict[str, Any] = {"skip_first": None, "wait": 0, "warmup": 1, "active": 2}
    trainer = trainer_with(tiny_mixture, tmp_path, stop(9), with_stack=False, **options)
    trainer.callbacks["touch"] = touch = Touch(tmp_path / "profile", 3)
    touch.trainer = trainer
    trainer.fit()
    assert names(tmp_path) == ["rank00000-steps5-6.md", "rank00000-steps5-6.trace.json.gz"]
    assert not (tmp_path / "profile").exists()


def test_memory_is_in_the_trace_where_it_is_asked_for(tiny_mixture: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"wait": 0, "warmup": 0, "active": 1, "with_stack": False}
    for memory in (False, True):
        folder = tmp_path / str(memory)
        trainer_with(tiny_mixture, folder, stop(2), profile_memory=memory, **options).fit()
        (path,) = (folder / "profiler").glob("*.gz")
        assert any(event["name"] == "[memory]" for event in trace(path)) == memory


def test_a_run_that_ends_in_a_cycle_leaves_what_was_seen(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"wait": 0, "warmup": 0, "active": 50, "with_stack": False}
    trainer_with(tiny_mixture, tmp_path, stop(3), **options).fit()
    assert "rank00000-steps1-3.md" in names(tmp_path)


def test_a_trace_that_cannot_be_written_ends_nothing(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profiler").write_text("in the way")
    options: dict[str, Any] = {"wait": 0, "warmup": 0, "active": 1, "with_stack": False}
    trainer_with(tiny_mixture, tmp_path, stop(3), **options).fit()
    assert "warning: no trace of steps 1 to 1" in capsys.readouterr().err
    assert metrics(tmp_path)[-1]["step"] == 3


def profile_ranks(lock: str, folder: str, ranks: str | None, demand: bool) -> list[str]:
    trainer = build_trainer(
        Path(lock),
        Path(folder),
        OFF,
        stop(14 if demand else 3),
        "--train_module.dp_config={name: fsdp, param_dtype: float32}",
        callbacks={
            "profiler": ProfilerCallback(
                ranks=ranks,  # type: ignore[arg-type]
                skip_first=None if demand else 0,
                wait=0,
                warmup=0,
                active=2,
                with_stack=False,
            )
        },
        world=group_world(),
    )
    if demand and trainer.world.main:
        Path(folder, "profile").touch()
    trainer.fit()
    return names(Path(folder))


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("ranks", "demand", "wanted"),
    [
        (None, False, ["rank00000-steps1-2"]),
        ("dp_shard", False, ["rank00000-steps1-2"]),
        ("all", True, ["rank00000-steps1-2", "rank00001-steps1-2"]),
    ],
)
def test_each_chosen_rank_has_its_file(
    tiny_mixture: Path, tmp_path: Path, ranks: str | None, demand: bool, wanted: list[str]
) -> None:
    run_ranks(profile_ranks, 2, str(tiny_mixture), str(tmp_path), ranks, demand)
    assert [name[:-3] for name in names(tmp_path) if name.endswith(".md")] == wanted
    rows = table_of(tmp_path / "profiler" / f"{wanted[0]}.md")
    exposed, hidden = float(rows[0][3]), float(rows[0][6])
    assert exposed + hidden > 0  # of gloo


def test_an_axis_that_there_is_not_is_refused(tiny_mixture: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no axis dp_replicate"):
        trainer_with(tiny_mixture, tmp_path, ranks="dp_replicate").fit()


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_a_memory_snapshot_without_cuda_is_refused(tiny_mixture: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="memory_snapshot has no effect"):
        trainer_with(tiny_mixture, tmp_path, memory_snapshot=True).fit()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_memory_snapshot_lies_beside_the_trace(tiny_mixture: Path, tmp_path: Path) -> None:
    from olm_train.distributed.world import World

    callback = ProfilerCallback(
        wait=0, warmup=1, active=1, memory_snapshot=True, enable_cuda_sync_events=True
    )
    build_trainer(
        tiny_mixture,
        tmp_path,
        OFF,
        stop(4),
        callbacks={"profiler": callback},
        world=World(device=torch.device("cuda")),
    ).fit()
    assert (tmp_path / "profiler" / "rank00000-steps2-2.memory.pickle").stat().st_size > 1000
    events = trace(tmp_path / "profiler" / "rank00000-steps2-2.trace.json.gz")
    assert any(event.get("cat") == "kernel" for event in events)


GPU = [
    TraceEvent(name="gemm", kind="kernel", start=0, stop=40),
    TraceEvent(name="Memcpy HtoD", kind="gpu_memcpy", start=35, stop=50),
    TraceEvent(name="ncclDevKernel_AllGather", kind="kernel", start=30, stop=70),
    TraceEvent(name=DATA_WAIT, kind="user_annotation", start=60, stop=80),
    TraceEvent(name="aten::mm", kind="cpu_op", start=0, stop=100),
]
CPU = [
    TraceEvent(name="aten::mm", kind="cpu_op", start=10, stop=40),
    TraceEvent(name="aten::t", kind="cpu_op", start=12, stop=14),  # within the other
    TraceEvent(name="gloo:all_reduce", kind="cpu_op", start=30, stop=60),
    TraceEvent(name=DATA_WAIT, kind="user_annotation", start=90, stop=130),  # and of the next step
    TraceEvent(name="ProfilerStep#3", kind="user_annotation", start=0, stop=100),
]


@pytest.mark.parametrize(
    ("events", "on_device", "wanted"),
    [
        (GPU, True, (100, 50, 20, 10, 20, 20)),
        (CPU, False, (100, 30, 20, 10, 40, 10)),
        ([], True, (100, 0, 0, 0, 100, 0)),
    ],
)
def test_the_parts_of_a_step_add_up_to_it(
    events: list[TraceEvent], on_device: bool, wanted: tuple[int, ...]
) -> None:
    found = step_times((0, 100), events, on_device=on_device)
    assert astuple(found) == wanted
    assert found.compute + found.communication + found.data_wait + found.idle == found.total


def test_spans_that_touch_are_one() -> None:
    assert union([(5, 9), (0, 2), (2, 3), (6, 7)]) == [(0, 3), (5, 9)]


def test_the_table_has_a_row_a_step_and_shares() -> None:
    times = StepTimes(
        total=2_000_000,
        compute=1_000_000,
        communication=500_000,
        data_wait=500_000,
        idle=0,
        hidden=250_000,
    )
    lines = table([(7, times), (8, times)], "Steps 7 to 8").splitlines()
    assert lines[0] == "# Steps 7 to 8"
    assert lines[4].startswith("| step | total | compute | communication | data wait | idle |")
    assert lines[6] == "| 7 | 2.00 | 1.00 | 0.50 | 0.50 | 0.00 | 0.25 |"
    assert lines[8] == "| share | 100.0% | 50.0% | 25.0% | 25.0% | 0.0% | 12.5% |"
