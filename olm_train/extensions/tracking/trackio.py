"""trackio: a SQLite file in TRACKIO_DIR, or a server that TRACKIO_SERVER_URL or _SPACE_ID names.

The client writes in a thread of its own, and drops what a full disk refuses. So the file says how
far a tracker came: steps after a hole or whose weights are lost are deleted in it when the run is
opened again, by a start or `olm-train track`. A server keeps those; their first values stay.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from olm_data.counts import counted
from olm_data.errors import StorageError, typed
from olm_data.extensions.watching.follow import LoggedStep
from olm_data.extras import needs
from olm_train.extensions.tracking.base import Ending, Level, TrackedRun, Tracker
from olm_train.extensions.tracking.callback import TrackerCallback

if TYPE_CHECKING:
    from trackio.run import Run

SERVERS = ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID")
"""Environment variables with which the client logs to a server."""
BUSY_SECONDS = 20.0
_CUT = """
DELETE FROM metrics WHERE run_id = :run AND id >=
(SELECT MIN(id) FROM metrics WHERE run_id = :run AND step > :there)
"""
"""What came with later steps goes with them: evaluations made beside the run, too."""


@dataclass(kw_only=True)
class TrackioCallback(TrackerCallback):
    """Shows the run in trackio: `trackio show --project PROJECT`.

    Attributes:
        enabled: show the run there, where `trackio` is given at all.
        name: of the run there; default: that of the run's folder. A second run of the name in a
            project gets a number.
        project: runs that belong together; default: "olm".
        group: of runs within the project.
    """

    kind: ClassVar[str] = "trackio"
    package: ClassVar[str] = "trackio"

    group: str | None = None

    def tracker(self, run: TrackedRun) -> Tracker:
        return TrackioTracker(run, self.group)


class TrackioTracker(Tracker):
    """A run of trackio, found again by its name in the project."""

    name = "trackio"
    any_order = by_arrival = True  # what the client drops of late rows comes again with later ones

    def __init__(self, run: TrackedRun, group: str | None = None) -> None:
        self._told, self._group = run, group
        self._run: Run | None = None
        self._last: int | None = None
        self._sent = range(0)  # steps since it was opened

    def open(self, key: str | None, logged: int) -> str:
        with needs("the tracker trackio"):
            import trackio

        self._finish()
        told = self._told
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
            self._run = trackio.init(
                project=told.project,
                name=key or self._free_name(),
                group=self._group,
                config={"name": told.name, "config": told.config},
                resume=self._how_to_resume(key),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self._last = self._run._initial_last_step
        return str(self._run.name)

    def truncate(self, step: int) -> int:
        from trackio.sqlite_storage import SQLiteStorage

        assert self._run is not None
        if any(os.environ.get(name) for name in SERVERS):
            return self._last or 0
        path = SQLiteStorage.get_project_db_path(self._told.project)
        there = 0
        if path.exists():
            with contextlib.closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as file, file:
                there = min(step, _whole(_steps(file, self._run.id)))
                of_run = {"run": self._run.id, "there": there}
                file.execute(_CUT, of_run)
        return there

    def log(self, steps: list[LoggedStep]) -> None:
        assert self._run is not None
        for step in steps:
            self._run.log(dict(step.metrics), step=step.step)
            first = self._sent.start if self._sent else step.step
            self._sent = range(first, max(self._sent.stop, step.step + 1))

    def alert(self, title: str, text: str, level: Level) -> None:
        from trackio import AlertLevel

        assert self._run is not None
        with contextlib.redirect_stdout(sys.stderr):
            self._run.alert(title, text, AlertLevel(level))

    def close(self, ending: Ending) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        id, sent, self._sent = "" if self._run is None else self._run.id, self._sent, range(0)
        self._finish()
        if not sent or any(os.environ.get(name) for name in SERVERS):
            return
        path = SQLiteStorage.get_project_db_path(self._told.project)
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as file:
            lost = len(sent) - len(set(sent) & {*_steps(file, id)})
        if lost:
            raise StorageError(
                f"trackio's client dropped {counted(lost, 'row')}, as on a full disk",
                where=str(path),
                fix=f"make room there, then: olm-train track {typed(str(self._told.folder))} "
                "--to trackio",
            )

    def _how_to_resume(self, key: str | None) -> str:
        """A process killed in its first second has a key, and trackio no row of it yet."""
        from trackio.sqlite_storage import SQLiteStorage

        if key is None:
            return "never"
        return "must" if key in SQLiteStorage.get_runs(self._told.project) else "allow"

    def _free_name(self) -> str:
        """Return the name of the run, with a number where the project has one of that name."""
        from trackio.sqlite_storage import SQLiteStorage

        taken = set(SQLiteStorage.get_runs(self._told.project))
        name, number = self._told.name, 1
        while name in taken:
            number += 1
            name = f"{self._told.name}-{number}"
        return name

    def _finish(self) -> None:
        if self._run is not None:
            from trackio.context_vars import current_run

            run, self._run = self._run, None
            current_run.set(None)  # or the client ends it again when the process ends
            with contextlib.redirect_stdout(sys.stderr):
                run.finish()  # type: ignore[no-untyped-call]


def _steps(file: sqlite3.Connection, id: str) -> list[int]:
    """Return the steps that a run has rows of, ascending."""
    found = file.execute(
        "SELECT DISTINCT step FROM metrics WHERE run_id = ? ORDER BY step", (id,)
    ).fetchall()
    return [step for (step,) in found]


def _whole(steps: list[int]) -> int:
    """Return the last of the steps before which none is missing, 0 for none."""
    last = 0
    for step in steps:
        if step > last + 1:
            break
        last = step
    return last
