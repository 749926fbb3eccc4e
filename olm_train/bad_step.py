"""The host's part when a step is bad: name its data, then do what the policy says.

    metrics read -> "optim/non-finite" is 1 -> bad-step00000012.json: rows, documents, files, lines
       skip:   a warning, the run goes on          halt: NonFiniteError
       rewind: the rows are left out -> newest checkpoint -> a new start, as after a kill

A rewind is a start like any other: it has its line in starts.jsonl, which names the rows, and those
stay left out when the run is started again. Never: decide whether a step is bad (stability.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olm_data.errors import OlmError
from olm_data.mixture.lock import Lock
from olm_data.order.skip import Range, merge_ranges
from olm_data.rows.views import LockRows
from olm_data.run_log.log import read_starts
from olm_data.run_log.metric_names import CE_LOSS, GRAD_NORM, NON_FINITE, STEP_SKIPPED
from olm_data.storage.disk import write_durable
from olm_train.checkpoint.resume import LoadPolicy, LoadStrategy, restore
from olm_train.stability import NonFinite

if TYPE_CHECKING:
    from olm_train.trainer import Trainer

PIECE = ("id", "input", "position", "position_kind", "shard", "document", "start", "stop")
"""What a report says of each document of a row, as `olm_data.rows.views.DocumentView` has it."""
MOST_SHOWN = 3


class NonFiniteError(OlmError):
    """The loss or the gradient norm is NaN or infinite; the step was not taken.

    Attributes:
        step: the step that was not taken.
        rows: half-open ranges of the global rows it was made of.
    """

    def __init__(self, step: int, rows: tuple[Range, ...], what: str, report: Path) -> None:
        self.step, self.rows = step, rows
        ranges = json.dumps([list(item) for item in rows])
        super().__init__(
            what,
            where=f"rows {ranges}; documents, files and lines in {report}",
            why="the step was not taken on any rank; the weights are those of the step before",
            fix="look at the rows with `olm-data show row LOCK N`; lower optim.lr, or leave the "
            f"rows out: --data_loader.skip='{ranges}'; train_module.non_finite=rewind does so by "
            "itself",
        )


def check_finite(trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
    """Look at the metrics of a step, just read; every rank calls it.

    Raises:
        NonFiniteError: the step is bad, and the policy is not to go on.
    """
    if not metrics.pop(NON_FINITE, 0.0):
        return
    loss, norm, loader = metrics[CE_LOSS], metrics[GRAD_NORM], trainer.data_loader
    rows = [int(row) for row in loader.rows_of_step(step - 1)]
    ranges = merge_ranges((row, row + 1) for row in rows)
    trainer.check_lease()
    report = trainer.work_dir / f"bad-step{step:08d}.json"
    found = {"step": step, "loss": str(loss), "grad_norm": str(norm)}
    documents = trainer.world.on_main(lambda: write_report(report, found, loader.lock, rows))
    what = f"step {step:,}: loss {loss}, gradient norm {norm}; {documents}"
    if trainer.train_module.non_finite is not NonFinite.skip:
        raise NonFiniteError(step, ranges, what, report)
    metrics[STEP_SKIPPED] = 1.0
    trainer.say(f"warning: {what}\n  the step is left out; its documents are in {report}")


def write_report(path: Path, found: dict[str, Any], lock: Lock, rows: list[int]) -> str:
    """Write which documents a step was made of, and return the first few in words."""
    shown, lines, places = LockRows(lock), [], []
    try:
        for row in rows:
            view = shown.view(row)
            pieces = [{name: getattr(piece, name) for name in PIECE} for piece in view.pieces]
            lines.append(
                {"row": row, "stage": view.stage, "source": view.source, "documents": pieces}
            )
            places += [
                f"{view.source} {piece.input} {piece.position_kind} {piece.position}"
                for piece in view.pieces
            ]
    except OlmError as error:  # a damaged dataset must not hide the bad step
        found = {**found, "incomplete": error.what}
    write_durable(path, json.dumps({**found, "rows": lines}, indent=1).encode() + b"\n")
    rest = f" and {len(places) - MOST_SHOWN:,} more" if len(places) > MOST_SHOWN else ""
    return f"documents: {', '.join(places[:MOST_SHOWN])}{rest}"


def rewind(trainer: Trainer, error: NonFiniteError) -> None:
    """Put a trainer back to its newest good checkpoint, without the rows of a bad step.

    Raises:
        NonFiniteError: the policy does not allow it, or there is no checkpoint to go back to.
    """
    allowed = trainer.train_module.non_finite is NonFinite.rewind
    if not allowed or not trainer.checkpoints or trainer.rewinds == trainer.max_rewinds:
        raise error
    trainer.rewinds += 1
    trainer.say(f"warning: {error.what}")
    trainer.say(f"rewinding, and leaving out rows {[list(item) for item in error.rows]}")
    leave_out(trainer, error.rows)
    trainer.bad_rows = error.rows
    restore(trainer, LoadPolicy(strategy=LoadStrategy.always))


def leave_out_recorded(trainer: Trainer) -> None:
    """Leave out the rows that earlier starts of the run went back for."""
    starts = trainer.world.on_main(lambda: read_starts(trainer.work_dir))
    digest = trainer.data_loader.lock.digest
    bad = [item for start in starts if start.lock == digest for item in start.bad]
    if bad and trainer.load_policy.strategy is not LoadStrategy.never:
        leave_out(trainer, bad)


def leave_out(trainer: Trainer, rows: list[Range] | tuple[Range, ...]) -> None:
    """Leave rows out from here on, which may make the run shorter than its schedule."""
    loader = trainer.data_loader
    loader.leave_out(rows)
    if "data_loader" in trainer.config:
        skip = [list(item) for item in loader.skip]
        changed = {**trainer.config["data_loader"], "skip": skip}
        trainer.config = {**trainer.config, "data_loader": changed}
    if trainer.stop_step > loader.steps:
        trainer.stop_step = loader.steps
        trainer.say(f"note: the rows left out shorten the run to {loader.steps:,} steps")
