"""A log read while it grows: every step once, whole, from any place."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.tracked import logged, write_log

from olm_data.errors import ValidationError
from olm_data.extensions.watching.follow import (
    LogTail,
    StepColumns,
    StepReader,
    last_step,
    lines_of_step,
    offset_of_step,
)
from olm_data.run_log.log import (
    METRICS,
    Evaluation,
    MetricsWriter,
    Start,
    Step,
    append_start,
    keep_until,
)


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


# A log is read on from where it was, whatever its writer does meanwhile.
FOREVER = float("inf")
START = Start(step=0, rewound=0, lock="f" * 64, global_batch_size=64, world_size=1, skip=())


def line(step: int) -> Step:
    return Step(step=step, tokens=64 * step, rows=(step, step + 1), metrics={"a": 0.5 * step})


def numbers(found: list[StepColumns | Evaluation]) -> list[int]:
    return [
        step
        for entry in found
        for step in (entry.step.tolist() if isinstance(entry, StepColumns) else [entry.step])
    ]


def steps(tail: LogTail) -> list[int]:
    return numbers(tail.read(FOREVER))


def first_place(tail: LogTail) -> int:
    first, *_ = tail.read(FOREVER)
    assert isinstance(first, StepColumns)
    return int(first.place[0])


def test_only_what_is_new_is_read_and_a_line_is_found_again(tmp_path: Path) -> None:
    tail, writer = LogTail(tmp_path, ["a"]), MetricsWriter(tmp_path)
    assert steps(tail) == []
    for step in (1, 2):
        writer.write(line(step))
    found = [entry for entry in tail.read(FOREVER) if isinstance(entry, StepColumns)]
    assert [v for entry in found for v in entry.metrics["a"].tolist()] == [0.5, 1.0]
    places = [int(place) for entry in found for place in entry.place]
    assert (steps(tail), tail.read_share) == ([], 1.0)
    writer.write(Evaluation(step=2, results={"web": {"CE loss": 1.0}}))
    writer.write(line(3))
    assert steps(tail) == [2, 3]
    again = tail.step_at(places[1])
    assert (again.step, again.rows) == (2, (2, 3))
    writer.close()


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    tail, path = LogTail(tmp_path, []), tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "tokens": 6, "rows": [0, 1]}\n{"step": 2, "tok')
    assert steps(tail) == [1]
    with path.open("ab") as file:
        file.write(b'ens": 12, "rows": [1, 2]}\n')
    assert steps(tail) == [2]


def test_a_log_that_a_resume_has_cut_is_read_anew(tmp_path: Path) -> None:
    tail, writer = LogTail(tmp_path, []), MetricsWriter(tmp_path)
    append_start(tmp_path, START)
    for step in (1, 2, 3):
        writer.write(line(step))
    writer.close()
    place = first_place(tail)
    before = tail.generation
    keep_until(tmp_path, 1)
    assert tail.step_at(place) is None
    assert steps(tail) == [1]
    assert tail.generation == before + 1


def test_a_long_log_is_read_a_part_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.extensions.watching.follow.PIECE", 50)  # bytes: less than a line
    tail, writer = LogTail(tmp_path, []), MetricsWriter(tmp_path)
    for step in range(1, 6):
        writer.write(line(step))
    writer.close()
    seen, shares = [], []
    for _ in range(5):
        seen += numbers(tail.read(0.0))
        shares.append(tail.read_share)
    assert seen == [1, 2, 3, 4, 5]
    assert 0 < shares[0] < shares[1] < shares[-1] == 1.0


def test_malformed_lines_are_left_out_counted_and_the_first_is_named(tmp_path: Path) -> None:
    tail, path = LogTail(tmp_path, []), tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "rows": [0, 1]}\n{"step": -1}\n{"step": 2, "rows": [1, 2]}\n')
    assert steps(tail) == [1, 2]
    assert tail.wrong.startswith("1 line of metrics.jsonl left out as malformed, the first: line 2")
    with path.open("a") as file:
        file.write("\0\0\n" * 2)
    assert steps(tail) == []
    assert tail.wrong.startswith(
        "3 lines of metrics.jsonl left out as malformed, the first: line 2"
    )


def test_a_line_beyond_all_bounds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.extensions.watching.follow.MAX_LINE", 3 << 20)
    (tmp_path / "metrics.jsonl").write_bytes(b" " * (4 << 20))
    with pytest.raises(ValidationError, match="malformed"):
        steps(LogTail(tmp_path, []))


def test_a_new_file_with_the_number_of_the_old_one_is_read_anew(tmp_path: Path) -> None:
    """As after two restarts between two looks: file systems give a free number away again."""
    path, tail = tmp_path / "metrics.jsonl", LogTail(tmp_path, ["a"])
    for steps_, name in ((range(1, 5), "old"), (range(2, 12), "new")):
        (tmp_path / name).mkdir()
        writer = MetricsWriter(tmp_path / name)
        for step in steps_:
            writer.write(line(step))
        writer.close()
    path.write_bytes((tmp_path / "old/metrics.jsonl").read_bytes())
    assert steps(tail) == [1, 2, 3, 4]
    path.write_bytes((tmp_path / "new/metrics.jsonl").read_bytes())  # longer, in the same place
    assert steps(tail) == list(range(2, 12))
    assert (tail.generation, tail.wrong) == (2, "")
