"""Trains the points of a ladder, one after the other, each an ordinary run.

What has ended is left out, and what was stopped goes on.

Plan -> without those of ladder.jsonl, by digest -> python -m olm_train.run BASE OPTIONS
                                                 -> held-out loss at the end -> ladder.jsonl
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from olm_data.errors import ValidationError
from olm_data.run_log.lines import append_line
from olm_data.run_log.log import RunLog
from olm_data.run_log.metric_names import EVAL_CE_LOSS
from olm_train.extensions.ladder.config import LadderConfig
from olm_train.extensions.ladder.plan import LadderPlan, Rung
from olm_train.extensions.ladder.points import RESULTS, Point, read_points


class Named(Protocol):
    """A point to train."""

    @property
    def name(self) -> str: ...


P = TypeVar("P", bound=Named)


def train(ladder: LadderConfig, plan: LadderPlan, say: Callable[[str], None]) -> int:
    """Train what is not trained yet; return the exit code of the first run that does not finish.

    Raises:
        ValidationError: a run has ended without its evaluation.
    """
    results = Path(ladder.folder) / RESULTS
    done = {point.digest for point in read_points(results)}
    missing = [rung for rung in plan.points if rung.digest not in done]

    def found(rung: Rung) -> Point:
        return point_of(ladder, plan.dataset, rung)

    return train_all(ladder.base, missing, results, lambda rung: rung.options, found, say)


def train_all(
    base: str,
    points: Sequence[P],
    results: Path,
    options: Callable[[P], Sequence[str]],
    found: Callable[[P], msgspec.Struct],
    say: Callable[[str], None],
) -> int:
    """Train points one after the other; return the code of the first run that does not finish.

    Args:
        options: of the run of a point, asked right before it.
        found: what a run that has ended has found: a line of `results`.
    """
    for number, point in enumerate(points, 1):
        say(f"point {number} of {len(points)}: {point.name}")
        if code := _ended([sys.executable, "-m", "olm_train.run", base, *options(point)]):
            return code
        results.parent.mkdir(parents=True, exist_ok=True)
        append_line(results, msgspec.json.encode(found(point)))
    return 0


def _ended(command: list[str]) -> int:
    """Return the exit code of a run; what asks this process to stop is passed on to it."""
    before = {}
    with subprocess.Popen(command, stdout=sys.stderr) as child:
        try:
            for number in (signal.SIGTERM, signal.SIGUSR1):
                before[number] = signal.signal(number, lambda n, _: child.send_signal(n))
            code = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def point_of(ladder: LadderConfig, dataset: str, rung: Rung) -> Point:
    """Return what a rung found: its held-out loss after the last step.

    Raises:
        ValidationError: its log has none.
    """
    folder = Path(ladder.folder) / rung.name
    loss = losses(folder, dataset).get(rung.steps)
    if loss is None:
        raise ValidationError(
            f"the run has no {EVAL_CE_LOSS} of {dataset} at step {rung.steps:,}", where=str(folder)
        )
    return Point(
        name=rung.name,
        digest=rung.digest,
        parameters=rung.parameters,
        tokens=rung.tokens,
        flops=rung.whole_flops,
        lr=rung.lr,
        batch=rung.batch,
        loss=loss,
    )


def losses(folder: Path, dataset: str) -> dict[int, float]:
    """Return the loss of a held-out set by the steps done before, in nats a token."""
    given = {
        e.step: e.results.get(dataset, {}).get(EVAL_CE_LOSS)
        for e in RunLog.read(folder).evaluations
    }
    return {step: loss for step, loss in given.items() if loss is not None}
