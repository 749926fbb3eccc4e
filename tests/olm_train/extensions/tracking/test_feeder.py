"""A tracker that hangs, fails or lies touches nothing, and has each step once in the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.polling import wait_until
from support.tracked import Sink, evaluated, logged, write_log

from olm_data.errors import ConflictError, ValidationError
from olm_data.extensions.watching.follow import LoggedStep
from olm_data.extensions.watching.watched import EVAL
from olm_data.run_log.log import Evaluation, MetricsWriter, keep_until
from olm_train.extensions.tracking.base import Ending, Tracker, without_secrets
from olm_train.extensions.tracking.feeder import (
    TRACKING,
    Feeder,
    TrackerCursor,
    TrackerState,
    is_behind,
    read_tracked,
    write_tracked,
)

SECRET = "abcdefgh12345678ijklmnop"


class Memory(Tracker):
    """Keeps what it is told; `fail` is called first in each method with its name."""

    name = "memory"

    def __init__(self, fail: Callable[[str], None] = lambda what: None, *, cuts: bool = True):
        self.fail, self.cuts = fail, cuts
        self.rows: Sink = []
        self.keys: list[str | None] = []
        self.ending: Ending | None = None

    def open(self, key: str | None, logged: int) -> str:
        self.fail("open")
        self.keys.append(key)
        return "k1"

    def truncate(self, step: int) -> int:
        self.fail("truncate")
        if self.cuts:
            self.rows = [row for row in self.rows if row[0] <= step]
        return self.rows[-1][0] if self.rows else 0

    def log(self, steps: list[LoggedStep]) -> None:
        for step in steps:
            self.fail("log")
            self.rows.append((step.step, step.metrics))

    def close(self, ending: Ending) -> None:
        self.fail("close")
        self.ending = ending


def fed(tracker: Tracker, folder: Path, said: list[str], step: int = 0, **more: object) -> Feeder:
    feeder = Feeder(tracker, folder, step=step, say=said.append, **more)  # type: ignore[arg-type]
    feeder.start()
    return feeder


def test_each_step_arrives_once_while_the_log_grows(tmp_path: Path) -> None:
    said: list[str] = []
    memory = Memory()
    write_log(tmp_path, range(1, 4))
    feeder = fed(memory, tmp_path, said)
    write_log(tmp_path, range(4, 30))
    feeder.wake()
    feeder.close("finished")
    assert memory.rows == logged(tmp_path)
    assert (memory.ending, said) == ("finished", [])
    tracked = read_tracked(tmp_path, "memory")
    assert tracked is not None
    assert (tracked.key, tracked.step, tracked.lines) == ("k1", 29, 1)


def test_a_start_further_back_removes_what_it_trains_again(tmp_path: Path) -> None:
    memory, said = Memory(), list[str]()
    write_log(tmp_path, range(1, 21))
    fed(memory, tmp_path, said).close("stopped")
    keep_until(tmp_path, 12)
    write_log(tmp_path, range(13, 18))
    fed(memory, tmp_path, said, 12).close("finished")
    assert memory.rows == logged(tmp_path)
    assert memory.keys == [None, "k1"]


def test_steps_to_remove_are_not_forgotten_where_a_start_cannot_reach_the_tracker(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    memory = Memory()
    write_log(tmp_path, range(1, 21))
    fed(memory, tmp_path, said).close("stopped")
    keep_until(tmp_path, 12)

    def absent(what: str) -> None:
        raise ConnectionError("nobody there")

    memory.fail = absent
    feeder = fed(memory, tmp_path, said, 12)
    write_log(tmp_path, range(13, 31))
    feeder.close("stopped")
    assert "olm-train track" in said[-1]
    memory.fail = lambda what: None
    fed(memory, tmp_path, said, 30).close("finished")
    assert memory.rows == logged(tmp_path)


def test_a_tracker_that_cannot_remove_has_no_step_twice(tmp_path: Path) -> None:
    memory, said = Memory(cuts=False), list[str]()
    write_log(tmp_path, range(1, 21))
    fed(memory, tmp_path, said).close("stopped")
    keep_until(tmp_path, 12)
    feeder = fed(memory, tmp_path, said, 12)
    write_log(tmp_path, range(13, 26))
    feeder.close("finished")
    assert [step for step, _ in memory.rows] == [*range(1, 26)]
    (note,) = said
    assert "memory keeps 8 steps after step 12, as it cannot remove them" in note


@pytest.mark.parametrize("when", ["open", "truncate", "log", "close"])
def test_an_error_is_told_once_and_what_is_missing_brought_later(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_API_KEY", SECRET)
    calls: list[str] = []

    def fail(what: str) -> None:
        calls.append(what)
        if what == when and calls.count(what) == 3 - (when in ("open", "close", "truncate")) * 2:
            raise ConnectionResetError(f"sent with {SECRET}")

    memory, said = Memory(fail), list[str]()
    write_log(tmp_path, range(1, 10))
    feeder = fed(memory, tmp_path, said)
    if when == "close":
        feeder.close("finished")
        assert "olm-train track" in said[1]
    else:
        wait_until(lambda: feeder.wake() or len(memory.rows) == 8, "the rows")
        feeder.close("finished")
        assert len(said) == 1
    assert "memory: ConnectionResetError: sent with ***" in said[0]
    assert memory.rows == logged(tmp_path)


def test_a_tracker_that_hangs_is_told_of_and_left_behind(tmp_path: Path) -> None:
    free = threading.Event()
    memory, said = Memory(lambda what: free.wait() and None), list[str]()
    write_log(tmp_path, range(1, 10))
    feeder = fed(memory, tmp_path, said, patience=0.05)
    wait_until(lambda: feeder.wake() or said, "a word")
    assert "open takes longer than 0.05 seconds" in said[0]
    feeder.close("finished")
    assert "has surely taken 0 of 9 steps" in said[1]
    free.set()
    feeder._thread.join(600)
    assert read_tracked(tmp_path, "memory") is None  # it has no say any more


def test_two_feeders_of_one_run_do_not_feed_at_once(tmp_path: Path) -> None:
    free = threading.Event()
    write_log(tmp_path, range(1, 10))
    first = fed(Memory(lambda what: free.wait() and None), tmp_path, [])
    wait_until(lambda: first._doing, "a call")
    with pytest.raises(ConflictError, match="another process feeds memory"):
        Feeder(Memory(), tmp_path, step=9, say=print).replay()
    free.set()
    first.close("finished")


def test_a_late_evaluation_of_the_last_step_arrives(tmp_path: Path) -> None:
    memory, said = Memory(), list[str]()
    write_log(tmp_path, range(1, 9))
    fed(memory, tmp_path, said).close("finished")
    feeder = fed(memory, tmp_path, said, 8)
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 8, "eval": {"late": {"PPL": 3.0}}}\n')
    feeder.close("finished")
    assert memory.rows[8:] == [(8, {"eval/late/PPL": 3.0})]


class Anywhere(Memory):
    """Takes rows of earlier steps."""

    any_order = True


def feed(tracker: Memory, folder: Path, step: int) -> None:
    said: list[str] = []
    Feeder(tracker, folder, step=step, say=said.append).replay()
    assert said == []


def watched_in(tracker: Memory) -> list[tuple[int, float]]:
    return [(n, row["watched/held/PPL"]) for n, row in tracker.rows if "watched/held/PPL" in row]


def test_evaluations_made_beside_a_run_come_once_at_their_steps(tmp_path: Path) -> None:
    tracker = Anywhere(cuts=False)
    write_log(tmp_path, range(1, 7))
    evaluated(tmp_path, 4, 40.0)
    evaluated(tmp_path, 2, 20.0)
    evaluated(tmp_path, 9, 90.0)  # the log is not there yet
    feed(tracker, tmp_path, 6)
    assert watched_in(tracker) == [(2, 20.0), (4, 40.0)]
    tracker.rows = tracker.rows[:6]
    feed(tracker, tmp_path, 6)
    assert watched_in(tracker) == []  # it has them
    evaluated(tmp_path, 4, 41.0, time=2.0)  # more data, or another checkpoint of that step
    feed(tracker, tmp_path, 6)
    assert watched_in(tracker) == [(4, 41.0)]


def test_a_tracker_of_ascending_rows_gets_them_behind_its_last_one(tmp_path: Path) -> None:
    tracker, said = Memory(), list[str]()
    write_log(tmp_path, range(1, 5))
    evaluated(tmp_path, 2, 20.0)
    feeder = fed(tracker, tmp_path, said)
    wait_until(lambda: len(tracker.rows) == 3, "the rows of the log")
    write_log(tmp_path, range(5, 8))
    feeder.close("stopped")
    assert [n for n, _ in tracker.rows] == [1, 2, 3, 4, 5, 6, 7]
    assert watched_in(tracker) == []
    evaluated(tmp_path, 7, 70.0)
    feed(tracker, tmp_path, 7)
    behind = [
        (8, {"watched/held/PPL": 20.0, "watched/step": 2}),
        (9, {"watched/held/PPL": 70.0, "watched/step": 7}),
    ]
    assert tracker.rows[7:] == behind
    tracked = read_tracked(tmp_path, "memory")
    assert tracked is not None
    assert (tracked.step, tracked.watched["step00000007.json"].at) == (7, 9)
    feed(tracker, tmp_path, 7)  # which go where the run is opened again, and come again
    assert tracker.rows[7:] == behind


def test_a_damaged_file_of_a_watcher_is_said_and_the_log_is_fed(tmp_path: Path) -> None:
    tracker, said = Anywhere(), list[str]()
    write_log(tmp_path, range(1, 4))
    evaluated(tmp_path, 2, 20.0)
    (tmp_path / EVAL / "step00000003.json").write_text("{")
    Feeder(tracker, tmp_path, step=3, say=said.append).replay()
    assert watched_in(tracker) == [(2, 20.0)]
    assert "eval/step00000003.json" in said[0]


def test_a_tracker_is_behind_until_it_has_every_line(tmp_path: Path) -> None:
    assert not is_behind(tmp_path, "memory")
    write_log(tmp_path, range(1, 5))
    assert is_behind(tmp_path, "memory")
    fed(Memory(), tmp_path, []).close("finished")
    assert not is_behind(tmp_path, "memory")
    writer = MetricsWriter(tmp_path)
    writer.write(Evaluation(step=4, time=1e9, results={"late": {"PPL": 4.0}}))
    writer.close()
    assert is_behind(tmp_path, "memory")
    fed(Memory(), tmp_path, [], 4).close("finished")
    keep_until(tmp_path, 2)
    feeder = Feeder(Memory(), tmp_path, step=2, say=pytest.fail)  # killed before it was fed
    assert feeder.tracked is not None
    assert is_behind(tmp_path, "memory")


def test_no_text_of_a_configuration_holds_a_credential() -> None:
    config = {f"s3://key:{SECRET}@host/a": [f"https://u:{SECRET}@host/b", ("x", 3)], "n": None}
    shown = without_secrets(config)
    assert SECRET not in str(shown)
    assert shown["n"] is None
    assert next(iter(shown.values()))[1] == ["x", 3]


GOLDEN = """\
{
 "trackers": {
  "wandb": {
   "key": "a1",
   "step": 12,
   "lines": 2,
   "keep": 7,
   "watched": {
    "step00000010.json": {
     "time": 1.5,
     "at": 12
    }
   }
  }
 },
 "version": 1
}
"""


def test_the_file_is_the_one_of_the_golden_text(tmp_path: Path) -> None:
    fed = {"step00000010.json": TrackerCursor(time=1.5, at=12)}
    tracked = TrackerState(key="a1", step=12, lines=2, keep=7, watched=fed)
    write_tracked(tmp_path, "wandb", tracked)
    assert (tmp_path / TRACKING).read_text() == GOLDEN
    assert read_tracked(tmp_path, "wandb") == tracked
    assert read_tracked(tmp_path, "comet") is None


def test_threads_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    def write(n: int) -> None:
        write_tracked(tmp_path, f"t{n % 8}", TrackerState(key="k", step=n))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(64)))
    assert all(read_tracked(tmp_path, f"t{n}") is not None for n in range(8))


@pytest.mark.parametrize("text", ["{", '{"trackers": {"a": {"step": 1}}}', '{"version": 2}'])
def test_a_malformed_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / TRACKING).write_text(text)
    with pytest.raises(ValidationError, match="malformed"):
        read_tracked(tmp_path, "wandb")
