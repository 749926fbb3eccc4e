"""A log read while it grows: every step once, whole, from any place."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.tracked import logged, write_log

from olm_data.extensions.watching.follow import StepReader, last_step, lines_of_step, offset_of_step
from olm_data.run_log.log import METRICS


def test_steps_come_once_and_whole_however_the_log_grows(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 24))
    whole = (tmp_path / METRICS).read_bytes()
    reader, found = StepReader(tmp_path), []
    for cut in [*range(0, len(whole), 97), len(whole)]:
        (tmp_path / METRICS).write_bytes(whole[:cut])
        found += [(step.step, step.metrics) for step in reader.read()]
    assert found == logged(tmp_path)[:-1]  # more lines may follow for the last one
    found += [(step.step, step.metrics) for step in reader.read(complete=True)]
    assert found == logged(tmp_path)


@pytest.mark.parametrize("step", [0, 1, 2, 5, 6, 22, 23, 24])
def test_the_lines_of_a_step_are_found_by_bisection(tmp_path: Path, step: int) -> None:
    write_log(tmp_path, range(1, 24))
    lines = (tmp_path / METRICS).read_bytes().splitlines(keepends=True)
    before = [line for line in lines if int(line.split(b",")[0].split(b":")[1]) < step]
    assert offset_of_step(tmp_path, step) == len(b"".join(before))
    assert lines_of_step(tmp_path, step) == (0 if not 0 < step < 24 else 1 + (step % 5 == 0))
    found = [each.step for each in StepReader(tmp_path, step).read(complete=True)]
    assert found == [*range(max(1, step), 24)]


def test_lines_that_were_read_before_are_left_out_and_counted(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 6))
    assert list(StepReader(tmp_path, 5, 2).read(complete=True)) == []
    (late,) = StepReader(tmp_path, 5, 1).read(complete=True)
    assert (late.step, late.lines, late.metrics) == (5, 2, {"eval/held/PPL": 5.0})


def test_a_log_that_is_not_there_yet_has_no_steps(tmp_path: Path) -> None:
    reader = StepReader(tmp_path)
    assert (last_step(tmp_path), offset_of_step(tmp_path, 3)) == (0, 0)
    assert list(reader.read(complete=True)) == []
    write_log(tmp_path, range(1, 3))
    assert last_step(tmp_path) == 2
    assert [step.step for step in reader.read(complete=True)] == [1, 2]


def test_what_the_log_has_as_null_is_nan(tmp_path: Path) -> None:
    line = '{"step": 1, "tokens": 1, "rows": [0, 1], "train/CE loss": null}\n'
    (tmp_path / METRICS).write_text(line)
    (step,) = StepReader(tmp_path).read(complete=True)
    assert math.isnan(step.metrics["train/CE loss"])
