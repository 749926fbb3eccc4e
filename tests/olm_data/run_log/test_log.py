"""The log of a run: exact bytes, each step once, and a word about what it lacks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.full_disk import files_of_at_most

from olm_data.errors import UsageError, ValidationError
from olm_data.run_log import lines as module
from olm_data.run_log.lines import append_line, lines, read_lines, replace_file
from olm_data.run_log.log import (
    METRICS,
    STARTS,
    End,
    Evaluation,
    MetricsWriter,
    RunLog,
    Start,
    Step,
    append_end,
    append_start,
    keep_until,
    read_ends,
    read_metrics,
)

GOLDEN = b"""\
{"step": 1, "time": 1767225600.125, "tokens": 64, "rows": [0, 4], "order": "9f2c", \
"train/CE loss": 5.1, "optim/lr": 1e-05, "train/tokens": 64.0}
{"step": 1, "time": 1767225601.5, "eval": {"web": {"CE loss": null, "PPL": 181.3, "tokens": 9}}}
{"step": 2, "time": 1767225602.0, "tokens": 128, "rows": [4, 10], "skipped": [[5, 7]], \
"order": "77aa", "train/CE loss": null, "optim/step skipped": 1.0}
"""


START = Start(step=0, rewound=0, lock="ab", global_batch_size=64, world_size=2, skip=((5, 7),))


GOLDEN_START = (
    b'{"step":0,"rewound":0,"lock":"ab","global_batch_size":64,"world_size":2,"skip":[[5,7]]}\n'
)


LINES: list[Step | Evaluation] = [
    Step(
        step=1,
        time=1767225600.125,
        tokens=64,
        rows=(0, 4),
        order="9f2c",
        metrics={"train/CE loss": 5.1, "optim/lr": 1e-5, "train/tokens": 64.0},
    ),
    Evaluation(
        step=1, time=1767225601.5, results={"web": {"CE loss": math.nan, "PPL": 181.3, "tokens": 9}}
    ),
    Step(
        step=2,
        time=1767225602.0,
        tokens=128,
        rows=(4, 10),
        skipped=((5, 7),),
        order="77aa",
        metrics={"train/CE loss": math.inf, "optim/step skipped": 1.0},
    ),
]


def written(*steps: int) -> str:
    entries = [{"step": n, "tokens": 9 * n, "rows": [n - 1, n]} for n in steps]
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def test_what_is_written_are_the_bytes_of_version_1(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for line in LINES:
        writer.write(line)
    writer.sync()
    writer.close()
    append_start(tmp_path, START)
    append_start(tmp_path, START)
    assert (tmp_path / METRICS).read_bytes() == GOLDEN
    assert (tmp_path / STARTS).read_bytes() == GOLDEN_START * 2


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(GOLDEN)
    (tmp_path / STARTS).write_bytes(GOLDEN_START)
    log = RunLog.read(tmp_path, metrics=("train/CE loss", "optim/lr", "optim/step skipped"))
    assert (log.starts, log.notes) == ([START], [])
    first, second = log.steps
    assert first.metrics == {"train/CE loss": 5.1, "optim/lr": 1e-5}
    assert second.metrics == {"train/CE loss": None, "optim/step skipped": 1.0}
    assert (second.rows, second.skipped, second.order) == ((4, 10), ((5, 7),), "77aa")
    assert [step.line for step in log.steps] == [1, 3]
    assert [step.taken for step in log.steps] == [True, False]
    assert log.evaluations[0].results == {"web": {"CE loss": None, "PPL": 181.3, "tokens": 9.0}}
    assert RunLog.read(tmp_path).steps[0].trained == 64


def test_a_metric_cannot_take_the_place_of_another_field(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    with pytest.raises(UsageError, match="a metric is named 'time'"):
        writer.write(Step(step=1, tokens=1, rows=(0, 1), metrics={"time": 3.0}))
    writer.close()
    assert (tmp_path / METRICS).read_bytes() == b""


@pytest.mark.parametrize(
    "line",
    [
        {"step": 1, "tokens": 9},
        {"step": 1, "tokens": 9, "rows": [3, 3]},
        {"step": 1, "tokens": 9, "rows": [0, 9], "skipped": [[9, 10]]},
        {"step": 1, "tokens": 9, "rows": [0, 9], "skipped": [[5, 6], [1, 2]]},
        {"step": 1, "tokens": 9, "rows": [0, 9], "time": -1},
        {"step": 1, "tokens": 9, "rows": [0, 9], "order": 5},
        {"step": 1, "tokens": 9, "rows": [0, 9], "version": 2},
        {"step": 1, "eval": {"web": {"CE loss": "low"}}},
        {"step": -1, "eval": {}},
    ],
)
def test_a_line_that_no_run_writes_is_refused_with_its_number(tmp_path: Path, line: Any) -> None:
    (tmp_path / METRICS).write_text(written(1) + json.dumps(line) + "\n")
    with pytest.raises(ValidationError, match="malformed") as caught:
        list(read_metrics(tmp_path))
    assert str(caught.value.why).startswith("line 2: ")
    with pytest.raises(ValidationError, match="malformed"):
        keep_until(tmp_path, 9)
    assert (tmp_path / METRICS).read_text() == written(1) + json.dumps(line) + "\n"


@pytest.mark.parametrize(
    ("before", "step", "after", "removed"),
    [
        (written(1, 2, 2, 3), 2, written(1, 2, 2), 1),
        (written(1, 2), 5, written(1, 2), 0),
        (written(1, 2), None, "", 2),
        (written(1, 2), 0, "", 2),
        (written(1, 2) + '{"step": 3, "lo', 9, written(1, 2), 0),  # cut off by a kill
        (written(1) + '{"step": 2, "eval": {}}\n', 1, written(1), 0),  # no step
        ("", 3, "", 0),
    ],
)
def test_lines_beyond_the_step_and_a_cut_last_one_go(
    tmp_path: Path, before: str, step: int | None, after: str, removed: int
) -> None:
    path = tmp_path / METRICS
    path.write_text(before)
    assert keep_until(tmp_path, step)[0] == removed
    assert path.read_text() == after
    assert [entry.name for entry in tmp_path.iterdir()] == [METRICS]


def test_a_step_of_data_from_no_lock_is_version_2_and_has_no_rows(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    step = Step(step=1, time=1.5, epoch=2, metrics={"train/CE loss": 5.0}, version=2)
    writer.write(step)
    writer.close()
    line = b'{"step": 1, "time": 1.5, "epoch": 2, "version": 2, "train/CE loss": 5.0}\n'
    assert (tmp_path / METRICS).read_bytes() == line
    assert list(read_metrics(tmp_path, metrics=["train/CE loss"])) == [
        msgspec.structs.replace(step, line=1)
    ]
    for wrong in (b'"version": 1', b'"version": 2, "rows": [0, 4]'):
        (tmp_path / METRICS).write_bytes(line.replace(b'"version": 2', wrong))
        with pytest.raises(ValidationError, match="malformed"):
            list(read_metrics(tmp_path))


# How a run ended is a line each time, read back as it was written.
STOPPED = End(step=4, time=1000.5, reason="stopped", by="SIGTERM")


CANCELLED = End(step=9, time=2000.25, reason="cancelled", by="stop file", why="<b> too slow")


def test_the_file_is_this(tmp_path: Path) -> None:
    append_end(tmp_path, STOPPED)
    append_end(tmp_path, CANCELLED)
    assert (tmp_path / "ends.jsonl").read_text() == (
        '{"step":4,"time":1000.5,"reason":"stopped","by":"SIGTERM"}\n'
        '{"step":9,"time":2000.25,"reason":"cancelled","by":"stop file","why":"<b> too slow"}\n'
    )
    assert read_ends(tmp_path) == [STOPPED, CANCELLED]


@pytest.mark.parametrize(
    "line", ['{"step": 1, "reason": "bored"}', '{"step": -1, "reason": "failed"}', "[]", "{"]
)
def test_a_line_that_no_run_writes_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "ends.jsonl").write_text(line + "\n")
    with pytest.raises(ValidationError, match="malformed"):
        read_ends(tmp_path)


# What the log of a run lacks is told, by its readers and at a resume.
def folder(tmp_path: Path, metrics: str | None, *starts: int) -> Path:
    """A run folder with these lines, and starts that went on from these steps."""
    if metrics is not None:
        (tmp_path / METRICS).write_text(metrics)
    for step in starts:
        start = Start(step=step, rewound=0, lock="ab", global_batch_size=64, world_size=2, skip=())
        append_start(tmp_path, start)
    return tmp_path


@pytest.mark.parametrize(
    ("metrics", "starts", "says"),
    [
        (written(1, 2, 3), (0,), []),
        (written(4, 5), (3,), []),  # began with the state of another run
        (written(1, 2, 3), (0, 2, 1), []),
        (None, (), []),
        ("", (0,), []),
        (written(1, 4, 5, 9), (0,), ["has no line of steps 2 to 3, 6 to 8"]),
        (written(3), (0,), ["has no line of steps 1 to 2"]),
        (written(1, 3), (0,), ["has no line of step 2"]),
        (written(1, 2, 2, 1, 3), (0,), ["has more than one line of steps 1 to 2"]),
        (written(1, 2), (), ["starts.jsonl is missing or empty"]),
        (None, (0,), ["metrics.jsonl is missing"]),
        (written(1) + '{"step"', (0,), ["metrics.jsonl is cut off after 7 bytes"]),
        (written(*range(1, 20, 2)), (0,), ["steps 2, 4, 6 and 6 more ranges"]),
    ],
)
def test_cut_missing_and_repeated_lines_are_told(
    tmp_path: Path, metrics: str | None, starts: tuple[int, ...], says: list[str]
) -> None:
    notes = RunLog.read(folder(tmp_path, metrics, *starts)).notes
    assert len(notes) == len(says), notes
    for note, part in zip(notes, says, strict=True):
        assert part in note
        assert str(tmp_path) in note


@pytest.mark.parametrize(
    ("metrics", "starts", "says"),
    [
        (written(1, 2, 3, 4), (0,), []),
        (written(1, 2), (0,), ["has no line of step 3"]),
        (written(), (0,), ["has no line of steps 1 to 3"]),
        (written(1, 2, 2, 3), (0,), ["has more than one line of step 2"]),
        (written(1, 2, 3), (), ["starts.jsonl is missing"]),
        (None, (0,), ["metrics.jsonl is missing"]),
        (None, (), ["metrics.jsonl and starts.jsonl are missing or empty"]),
        (written(), (), ["metrics.jsonl and starts.jsonl are missing or empty"]),
    ],
)
def test_a_start_learns_what_the_log_lacks_up_to_its_checkpoint(
    tmp_path: Path, metrics: str | None, starts: tuple[int, ...], says: list[str]
) -> None:
    notes = keep_until(folder(tmp_path, metrics, *starts), 3)[1]
    assert len(notes) == len(says), notes
    assert all(part in note for note, part in zip(notes, says, strict=True))


def test_a_start_with_the_state_of_another_run_has_no_log_to_lack(tmp_path: Path) -> None:
    assert keep_until(folder(tmp_path, None), 3, own=False) == (0, [])


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    number: int


def test_what_is_appended_is_read_and_a_torn_line_goes(tmp_path: Path) -> None:
    path, notes = tmp_path / "log.jsonl", list[str]()
    assert read_lines(path, Entry) == []
    append_line(path, b'{"number": 1}')
    with open(path, "ab") as file:
        file.write(b'{"num')
    assert read_lines(path, Entry, notes) == [Entry(1)]
    assert len(notes) == 1
    append_line(path, b'{"number":2}')
    assert read_lines(path, Entry) == [Entry(1), Entry(2)]
    assert path.read_bytes() == b'{"number": 1}\n{"number":2}\n'


def test_a_line_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_line(path, b'{"number":1}')
    append_line(path, b'{"other":2}')
    with pytest.raises(ValidationError, match="malformed") as caught:
        read_lines(path, Entry)
    assert "line 2" in str(caught.value)


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"x" * 100)
    monkeypatch.setattr(module, "MAX_LINE", 50)
    with pytest.raises(ValidationError, match="longer than 50 bytes"):
        list(lines(path))


def test_a_full_disk_keeps_the_old_file_and_no_part_of_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    replace_file(path, b"old")
    with pytest.raises(OSError, match="too large"), files_of_at_most(5):
        replace_file(path, b"123456789")
    assert [each.name for each in tmp_path.iterdir()] == ["log.jsonl"]
    assert path.read_bytes() == b"old"
