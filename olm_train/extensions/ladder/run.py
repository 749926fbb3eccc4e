"""Trains the points of a ladder, one after the other, each an ordinary run.

What has finished is left out, and what was stopped goes on.

Plan -> LadderRuns, without those of ladder.jsonl, by digest -> without those whose run has finished
    -> python -m olm_train.run BASE OPTIONS, here | jobs (submit.py)
    -> held-out loss at the end -> ladder.jsonl
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from olm_data.errors import ValidationError
from olm_data.run_log.lines import append_line
from olm_data.run_log.log import RunLog, read_ends
from olm_data.run_log.metric_names import EVAL_CE_LOSS
from olm_train.extensions.ladder.config import LadderConfig
from olm_train.extensions.ladder.plan import LadderPlan, Rung
from olm_train.extensions.ladder.points import RESULTS, Point, read_points
from olm_train.extensions.launch.exit_codes import exit_code


@dataclass(frozen=True, kw_only=True)
class LadderRun:
    """A point to train.

    Attributes:
        name: of its folder.
        options: of its run.
        found: what its run, which has finished, has found: a line of the results.
        begins: name of the point that it goes on from; "": at the first step.
        prepare: makes what the run reads, right before it.
    """

    name: str
    options: tuple[str, ...]
    found: Callable[[], msgspec.Struct]
    begins: str = ""
    prepare: Callable[[], object] | None = None


@dataclass(frozen=True, kw_only=True)
class LadderRuns:
    """Points to train.

    Attributes:
        base: train.yaml of all.
        results: file of what they find; the points are in its folder.
        tasks: without those that are in it, each after the one that it goes on from.
    """

    base: str
    results: Path
    tasks: list[LadderRun]

    def left(self, *, keep: bool = True) -> list[LadderRun]:
        """Return those whose run has not finished.

        Args:
            keep: what the others have found.

        Raises:
            ValidationError: a run has finished without its evaluation.
        """
        left = []
        for task in self.tasks:
            ends = read_ends(self.results.parent / task.name)
            if not (ends and ends[-1].reason == "finished"):
                left.append(task)
            elif keep:
                self.keep(task)
        return left

    def keep(self, task: LadderRun) -> None:
        """Add what a task has found to the results."""
        self.results.parent.mkdir(parents=True, exist_ok=True)
        append_line(self.results, msgspec.json.encode(task.found()))


def batch_of(ladder: LadderConfig, plan: LadderPlan) -> LadderRuns:
    """Return the points of a ladder that are not trained yet."""
    results = Path(ladder.folder) / RESULTS
    done = {point.digest for point in read_points(results)}
    tasks = [
        LadderRun(
            name=rung.name,
            options=rung.options,
            found=partial(point_of, ladder, plan.dataset, rung),
            begins=rung.begins,
        )
        for rung in plan.points
        if rung.digest not in done
    ]
    return LadderRuns(base=ladder.base, results=results, tasks=tasks)


def train(batch: LadderRuns, say: Callable[[str], None]) -> int:
    """Train points one after the other; return the code of the first run that does not finish.

    Raises:
        ValidationError: a run has finished without its evaluation.
    """
    left = batch.left()
    for number, task in enumerate(left, 1):
        say(f"point {number} of {len(left)}: {task.name}")
        if task.prepare:
            task.prepare()
        if code := _ended([sys.executable, "-m", "olm_train.run", batch.base, *task.options]):
            return code
        batch.keep(task)
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
    return exit_code(code)


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
