"""What the log of a run lacks is told, by its readers and at a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from olm_data.run_log.log import METRICS, RunLog, Start, append_start, keep_until


def lines(*steps: int) -> str:
    entries = [{"step": n, "tokens": 9 * n, "rows": [n - 1, n]} for n in steps]
    return "".join(json.dumps(entry) + "\n" for entry in entries)


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
        (lines(1, 2, 3), (0,), []),
        (lines(4, 5), (3,), []),  # began with the state of another run
        (lines(1, 2, 3), (0, 2, 1), []),
        (None, (), []),
        ("", (0,), []),
        (lines(1, 4, 5, 9), (0,), ["has no line of steps 2 to 3, 6 to 8"]),
        (lines(3), (0,), ["has no line of steps 1 to 2"]),
        (lines(1, 3), (0,), ["has no line of step 2"]),
        (lines(1, 2, 2, 1, 3), (0,), ["has more than one line of steps 1 to 2"]),
        (lines(1, 2), (), ["starts.jsonl is missing or empty"]),
        (None, (0,), ["metrics.jsonl is missing"]),
        (lines(1) + '{"step"', (0,), ["metrics.jsonl is cut off after 7 bytes"]),
        (lines(*range(1, 20, 2)), (0,), ["steps 2, 4, 6 and 6 more ranges"]),
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
        (lines(1, 2, 3, 4), (0,), []),
        (lines(1, 2), (0,), ["has no line of step 3"]),
        (lines(), (0,), ["has no line of steps 1 to 3"]),
        (lines(1, 2, 2, 3), (0,), ["has more than one line of step 2"]),
        (lines(1, 2, 3), (), ["starts.jsonl is missing"]),
        (None, (0,), ["metrics.jsonl is missing"]),
        (None, (), ["metrics.jsonl and starts.jsonl are missing or empty"]),
        (lines(), (), ["metrics.jsonl and starts.jsonl are missing or empty"]),
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
