"""trackio's own file: one run, found again, and a second one of its name with a number."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from support.forked import forked
from support.runs import REPOSITORY
from support.tracked import of_trackio, write_log


def ran(program: str, tmp_path: Path, *words: Path) -> None:
    """Run a program in a process of its own: the client reads its folder when it is imported."""
    (tmp_path / "trackio_program.py").write_text(program)
    paths = f"{REPOSITORY}:{REPOSITORY / 'tests'}:{tmp_path}"
    home = {"TRACKIO_DIR": str(tmp_path / "db"), "HOME": str(tmp_path), "PYTHONPATH": paths}
    done = forked("trackio_program", *words, environment=home, timeout=600)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


PROGRAM = """
import sys
from pathlib import Path
from olm_train.extensions.tracking.trackio import TrackioCallback
from olm_train.extensions.tracking.command import replay
options = dict(project="lab", name="same", group="g")
for folder in sys.argv[1:]:
    replay(Path(folder), TrackioCallback(**options), {"seed": 1})
"""


@pytest.mark.slow
def test_runs_of_one_name_stay_apart_and_each_is_found_again(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    write_log(one, range(1, 6))
    write_log(other, range(1, 4))
    ran(PROGRAM, tmp_path, one, other, one)
    with sqlite3.connect(tmp_path / "db/lab.db") as file:
        counts = file.execute("SELECT run_name, COUNT(*) FROM metrics GROUP BY run_id").fetchall()
        groups = file.execute("SELECT config FROM configs").fetchall()
    assert sorted(counts) == [("same", 5), ("same-2", 3)]
    shown = [json.loads(text) for (text,) in groups]  # bytes or text, by the client's encoder
    assert [config["_Group"] for config in shown] == ["g", "g"]
    assert shown[0]["config"] == {"seed": 1}


LOSES = """
import os, sqlite3, sys
from pathlib import Path
from support.polling import wait_until
from olm_data.errors import StorageError
from olm_data.extensions.watching.follow import StepReader
from olm_train.extensions.tracking.trackio import TrackioCallback
callback, folder = TrackioCallback(project="lab"), Path(sys.argv[1])
tracker = callback.tracker(callback.tracked_run(folder, {}))
key = tracker.open(None, 0)
assert tracker.truncate(0) == 0
tracker.log(list(StepReader(folder).read(complete=True)))
path = Path(os.environ["TRACKIO_DIR"]) / "lab.db"
def count():
    try:
        return sqlite3.connect(path).execute("SELECT COUNT(*) FROM metrics").fetchone()[0]
    except sqlite3.OperationalError:  # no table yet
        return 0
wait_until(lambda: path.exists() and count() == 9, "rows")
with sqlite3.connect(path) as file:  # the client only warns of rows that a full disk refuses
    file.execute("DELETE FROM metrics WHERE step IN (4, 5)")
try:
    tracker.close("finished")
except StorageError as error:
    assert "dropped 2 rows" in error.what
else:
    sys.exit("nothing was said of rows that are not there")
assert tracker.open(key, 9) == key
assert tracker.truncate(9) == 3
tracker.log(list(StepReader(folder, 4).read(complete=True)))
tracker.close("finished")
assert count() == 9
"""


@pytest.mark.slow
def test_rows_that_the_client_dropped_are_found_when_the_run_is_opened_again(
    tmp_path: Path,
) -> None:
    write_log(tmp_path / "run", range(1, 10))
    ran(LOSES, tmp_path, tmp_path / "run")


BACK = """
import sys
from pathlib import Path
from support.tracked import evaluated, write_log
from olm_data.run_log.log import keep_until
from olm_train.extensions.tracking.feeder import Feeder
from olm_train.extensions.tracking.trackio import TrackioCallback
callback, folder = TrackioCallback(project="lab"), Path(sys.argv[1])
def feed(step):
    tracker = callback.tracker(callback.tracked_run(folder, {}))
    Feeder(tracker, folder, step=step, say=sys.exit).replay()
write_log(folder, range(1, 9))
evaluated(folder, 2, 20.0)
evaluated(folder, 7, 70.0)
feed(0)
keep_until(folder, 5)
write_log(folder, range(6, 12))
feed(5)
"""


@pytest.mark.slow
def test_an_evaluation_made_beside_the_run_is_there_once_where_the_run_goes_back(
    tmp_path: Path,
) -> None:
    ran(BACK, tmp_path, tmp_path / "run")
    rows = of_trackio(tmp_path / "db")
    points = [(n, row["watched/held/PPL"]) for n, row in rows if "watched/held/PPL" in row]
    assert sorted(points) == [(2, 20.0), (7, 70.0)]
    assert sorted({n for n, _ in rows}) == [*range(1, 12)]
