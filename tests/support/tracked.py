"""What trackers were told: logs made without training, and the sinks read back."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import struct
import subprocess
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from support.forked import python
from support.runs import environment, metrics, run, write_config
from support.service_stub import Service, serving

from olm_data.extensions.watching.watched import EVAL, Measured, WatchedEvaluation
from olm_data.run_log.log import METRICS, Evaluation, MetricsWriter, Step
from olm_data.run_log.metric_names import CE_LOSS, LR
from olm_data.storage.store import Store

Sink = list[tuple[int, dict[str, float]]]
"""Step and metrics of each row of a sink, in its order."""


def write_log(folder: Path, steps: range, evaluate: int = 5) -> None:
    """Append steps to a log, and after every `evaluate`-th an evaluation."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = MetricsWriter(folder)
    for n in steps:
        metrics: dict[str, float | None] = {CE_LOSS: loss_of(n), LR: 1e-3}
        line = Step(step=n, time=1e9 + n, tokens=256 * n, rows=(8 * n - 8, 8 * n), metrics=metrics)
        writer.write(line)
        if n % evaluate == 0:
            writer.write(Evaluation(step=n, time=1e9 + n, results={"held": {"PPL": float(n)}}))
    writer.close()


def loss_of(step: int) -> float:
    return 5 - math.log(step)


def evaluated(folder: Path, step: int, value: float, time: float = 1.0) -> None:
    """Leave what a watcher leaves."""
    WatchedEvaluation(
        checkpoint=f"step{step:08d}",
        digest="a" * 64,
        step=step,
        time=time,
        data={"held": Measured(digest="d", sequence_length=8)},
        results={"held": {"PPL": value}},
    ).write(Store(str(folder)).child(EVAL))


def logged(folder: Path) -> Sink:
    """What a complete replica of a log has."""
    found: dict[int, dict[str, float]] = {}
    for text in (folder / METRICS).read_text().splitlines():
        line = json.loads(text)
        row = found.setdefault(line["step"], {})
        row |= {name: value for name, value in line.items() if "/" in name}
        for name, results in line.get("eval", {}).items():
            row |= {f"eval/{name}/{metric}": value for metric, value in results.items()}
    return sorted(found.items())


def of_tensorboard(folder: Path) -> Sink:
    """Scalars as a reader of the folder shows them, rounded to fp32 by the format."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    points = [
        (event.step, tag, event.value)
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    ]
    double = [key for key, n in Counter((step, tag) for step, tag, _ in points).items() if n > 1]
    assert not double
    found: dict[int, dict[str, float]] = {}
    for step, tag, value in points:
        found.setdefault(step, {})[tag] = value
    return sorted(found.items())


def of_comet(folder: Path) -> Sink:
    """Metrics by step of the one archive in a folder; none is there twice."""
    (path,) = folder.glob("comet/*.zip")
    found: dict[int, dict[str, float]] = {}
    with zipfile.ZipFile(path) as file:
        messages = [json.loads(line) for line in file.read("messages.json").splitlines()]
    for message in messages:
        if message["type"] == "metric_msg":
            point = message["payload"]["metric"]
            row = found.setdefault(point["step"], {})
            assert point["metricName"] not in row, point
            row[point["metricName"]] = point["metricValue"]
    return sorted(found.items())


def of_trackio(folder: Path) -> Sink:
    """Rows of the one run in the SQLite files of a folder."""
    (path,) = (path for path in folder.glob("*.db"))
    with sqlite3.connect(path) as file:
        rows = file.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
        assert file.execute("SELECT COUNT(DISTINCT run_id) FROM metrics").fetchone()[0] <= 1
    return [(step, json.loads(metrics)) for step, metrics in rows]


def records_of_wandb(path: Path) -> Iterator[Any]:
    """Yield the records of a file of the offline client, in the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    content, place, data = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:  # too little for the head of a piece
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        data += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or its last piece
            record = Record()
            record.ParseFromString(data)
            data = b""
            yield record


def of_wandb(folder: Path) -> Sink:
    """Rows of the files that the offline client wrote, of all starts."""
    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in records_of_wandb(path):
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
                rows.append((record.history.step.num, {n: v for n, v in items.items() if "/" in n}))
    return rows


def same(found: Sink, wanted: Sink, *, digits: int = 12) -> bool:
    """Whether two sinks have the same rows, each step once, in any order of names."""
    assert [step for step, _ in found] == [step for step, _ in wanted]
    for (step, row), (_, other) in zip(found, wanted, strict=True):
        assert row.keys() == other.keys(), step
        for name in row:
            assert math.isclose(row[name], other[name], rel_tol=10.0**-digits), (step, name)
    return True


PROGRAM = """
import runpy
from olm_train.extensions.tracking import callback
callback.PATIENCE = SECONDS
runpy.run_module("olm_train.run", run_name="__main__", alter_sys=True)
"""
"""A run that waits for a tracker that works as long as a slow machine takes, and for none else."""
MODES = ("ok", "hang", "500", "absent")
"""What a server does, as `support.service_stub` has it."""


def trained_beside(
    services: Mapping[str, Service],
    name: str,
    variables: Callable[[str], dict[str, str]],
    lock: Path,
    folder: Path,
) -> dict[str, str]:
    """Train in `alone`, and with a tracker beside each server, in a folder named as its mode.

    Losses are the same; a server that does not answer well is told, with the command that helps.
    Runs beside such servers wait for most of their time: they go on at once.

    Args:
        services: by mode.
        name: of the tracker.
        variables: those that point its client at a URL.

    Returns:
        What each tracked run said, by mode.
    """
    done = run(write_config(folder / "alone.yaml", lock, folder / "alone"))
    assert done.returncode == 0, done.stderr
    said: dict[str, str] = {}
    for modes in (["ok"], [mode for mode in services if mode != "ok"]):
        with contextlib.ExitStack() as stack:
            runs = {}
            for mode in modes:
                config = write_config(folder / f"{mode}.yaml", lock, folder / mode)
                url = stack.enter_context(serving(services[mode]))
                program = folder / f"{mode}.py"
                program.write_text(PROGRAM.replace("SECONDS", "600.0" if mode == "ok" else "5.0"))
                process = subprocess.Popen(
                    [python(), program, config, f"--trainer.callbacks.{name}={{}}"],
                    env={**environment(), **variables(url)},
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                runs[mode] = stack.enter_context(process)
                stack.callback(process.kill)  # where another one fails
            for mode, process in runs.items():
                said[mode] = process.communicate(timeout=900)[1]
                assert process.returncode == 0, (mode, said[mode])
                assert metrics(folder / mode) == metrics(folder / "alone"), mode
                if mode != "ok":
                    assert f"{name} has surely taken 0 of 24 steps" in said[mode], mode
                    assert "olm-train track" in said[mode], mode
    return said
