"""The host's part when a step is bad: name its data.

    metrics read -> "optim/non-finite" is 1 -> bad-step00000012.json: rows, documents, files, lines
       skip:   a warning, the run goes on          halt: NonFiniteError
       rewind: the rows are left out -> newest checkpoint -> a new start, as after a kill

A rewind is a start like any other: it has its line in starts.jsonl, which names the rows, and those
stay left out when the run is started again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from olm_data.decoding import convert
from olm_data.errors import OlmError
from olm_data.mixture.lock import Lock
from olm_data.order.steps import Range, merge_ranges
from olm_data.rows.views import LockRows
from olm_data.run_log.log import read_starts
from olm_data.run_log.metric_names import CE_LOSS, GRAD_NORM, STEP_SKIPPED
from olm_data.run_log.run_folder import BadDocument, BadRow, BadStep
from olm_train.data.base import DataLoaderBase
from olm_train.distributed.world import World
from olm_train.stability.gate import NonFinite

MOST_SHOWN = 3
NO_LOCK = "the data come from no mixture lock"


class NonFiniteError(OlmError):
    """The loss or the gradient norm is NaN or infinite; the step was not taken.

    Attributes:
        step: the step that was not taken.
        rows: half-open ranges of the global rows it was made of; none without a lock.
    """

    def __init__(self, step: int, rows: tuple[Range, ...], what: str, report: Path) -> None:
        self.step, self.rows = step, rows
        ranges = json.dumps([list(item) for item in rows])
        super().__init__(
            what,
            where=f"rows {ranges}; documents, files and lines in {report}" if rows else str(report),
            why="the step was not taken on any rank; the weights are those of the step before",
            fix="look at the rows with `olm-data show row LOCK N`; lower optim.lr, or leave the "
            f"rows out: --data_loader.skip='{ranges}'; train_module.non_finite=rewind does so by "
            "itself"
            if rows
            else "lower the learning rate, or go on without the step: non_finite=NonFinite.skip",
        )


class BadSteps:
    """The bad steps of a run; every rank makes one and calls it alike.

    Args:
        loader: rows of the run.
        work_dir: local folder of the reports.
        world: the ranks of the run.
        max_rewinds: how often the run may go back for one.
        say: prints a line, on rank 0.

    Attributes:
        rewinds: how often the run went back for one.
        rows: those of the last one that it went back for.
    """

    def __init__(
        self,
        loader: DataLoaderBase,
        work_dir: Path,
        world: World,
        max_rewinds: int,
        say: Callable[[str], None],
    ) -> None:
        self._loader, self._work_dir, self._world = loader, work_dir, world
        self._say, self._max_rewinds = say, max_rewinds
        self.rewinds = 0
        self.rows: tuple[Range, ...] = ()

    def told(self, step: int, metrics: Mapping[str, float], policy: NonFinite) -> dict[str, float]:
        """Write the report of a bad step; return metrics that say that it was left out.

        Raises:
            NonFiniteError: the policy is not to go on.
        """
        loss, norm, lock = metrics[CE_LOSS], metrics[GRAD_NORM], self._loader.lock
        rows = [int(row) for row in self._loader.rows_of_step(step - 1)]
        ranges = merge_ranges((row, row + 1) for row in rows)
        report = self._work_dir / f"bad-step{step:08d}.json"
        spelt = str(loss), str(norm)
        documents = self._world.on_main(lambda: write_report(report, step, *spelt, lock, rows))
        what = f"step {step:,}: loss {loss}, gradient norm {norm}; {documents}"
        if policy is not NonFinite.skip:
            raise NonFiniteError(step, ranges, what, report)
        self._say(f"warning: {what}\n  the step is left out; its documents are in {report}")
        return {STEP_SKIPPED: 1.0}

    def count_rewind(self, error: NonFiniteError, policy: NonFinite, *, can_go_back: bool) -> None:
        """Before the run goes back for a bad step.

        Raises:
            NonFiniteError: the policy is another, there is nothing to go back to, or it went back
                too often.
        """
        if not self.goes_back(policy, can_go_back=can_go_back):
            raise error
        self.rewinds += 1
        self.rows = error.rows
        self._say(f"warning: {error.what}")
        self._say(f"rewinding, and leaving out rows {[list(item) for item in error.rows]}")

    def goes_back(self, policy: NonFinite, *, can_go_back: bool) -> bool:
        """Whether the run answers a bad step by going back to a checkpoint, if there is one."""
        # Without rows of a lock to leave out, it would only come back to the same step.
        allowed = policy is NonFinite.rewind and can_go_back and self._loader.lock is not None
        return allowed and self.rewinds < self._max_rewinds

    def earlier(self) -> list[Range]:
        """Return the rows that earlier starts of the run went back for."""
        starts = self._world.on_main(lambda: read_starts(self._work_dir))
        digest = self._loader.lock.digest if self._loader.lock else ""
        return [item for start in starts if start.lock == digest for item in start.bad]


def write_report(
    path: Path, step: int, loss: str, grad_norm: str, lock: Lock | None, rows: list[int]
) -> str:
    """Write which documents a step was made of, and return the first few in words.

    Without a lock they are not known, and that is said.
    """
    told, incomplete = list[BadRow](), None if lock else NO_LOCK
    shown = LockRows(lock) if lock else None
    try:
        for row in rows:
            assert shown is not None, "rows are those of a lock"
            view = shown.view(row)
            pieces = convert(view.pieces, list[BadDocument], from_attributes=True)
            told.append(BadRow(row, view.stage, view.source, pieces))
    except OlmError as error:  # a damaged dataset must not hide the bad step
        incomplete = error.what
    bad = BadStep(step=step, loss=loss, grad_norm=grad_norm, incomplete=incomplete, rows=told)
    bad.write(path)
    places = bad.places()
    rest = f" and {len(places) - MOST_SHOWN:,} more" if len(places) > MOST_SHOWN else ""
    if lock is None:
        return f"documents not known: {NO_LOCK}"
    return f"documents: {', '.join(places[:MOST_SHOWN])}{rest}"
