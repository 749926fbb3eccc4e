"""Does this start compute what the run computed? Logged steps are taken again and compared.

    metrics.jsonl -> last logged step L -> newest checkpoint of step C <= L - k
       C -> steps C+1 .. C+k -> loss, gradient norm == those logged? | told, the run ends
         -> the newest checkpoint again -> training

Another driver, a device that computes wrongly, a changed configuration or weights that are not
those of the run show here, before a step of this start is logged or saved. Cost: k steps, and
reading up to two more checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from olm_data.config.hints import NonNegativeFloat, PositiveInt
from olm_data.errors import ValidationError
from olm_data.run_log.log import Start, Step, read_metrics, read_starts
from olm_data.run_log.metric_names import CE_LOSS, GRAD_NORM
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.load import Checkpoint, newest_checkpoint
from olm_train.metrics import MetricsBuffer

COMPARED = (CE_LOSS, GRAD_NORM)
OTHERWISE = 1e-3
"""Tolerance, relative, where bits cannot be expected."""


@dataclass(kw_only=True)
class ReplayCheckerCallback(Callback):
    """Repeats logged steps at a resume, and compares.

    Runs before the metric saver, which cuts the log.

    Attributes:
        enabled: at a resume, where `replay_checker` is given at all, take logged steps again and
            compare loss and gradient norm with `metrics.jsonl`.
        steps: so many steps, the first ones after the newest checkpoint with so many logged after
            it; fewer where there is none.
        tolerance: relative difference that is allowed, 0: none; default: none on the CPU with as
            many ranks as logged them, else 0.001.
        strict: a difference ends the run; false: it is a warning.
    """

    priority: ClassVar[int] = 8

    enabled: bool = True
    steps: PositiveInt = 5
    tolerance: NonNegativeFloat | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._done = False

    def pre_train(self) -> None:
        # Once a start: a run that goes back for a bad step would only meet it here again.
        if self.trainer.resumed and not self._done:
            self._check()
        self._done = True

    def _check(self) -> None:
        trainer = self.trainer
        logged = trainer.world.on_main(lambda: read_logged(trainer.work_dir))
        last = max(logged, default=0)
        checkpoint = self._newest(last - self.steps) or self._newest(last - 1)
        # Rows left out since, or a batch size changed since, make other steps of the same numbers.
        steps = []
        for step in range((checkpoint.step if checkpoint else last) + 1, last + 1):
            known = step in logged and step <= trainer.stop_step
            if not known or trainer.data_loader.order_digest(step - 1) != logged[step].order:
                break
            steps.append(step)
        steps = steps[: self.steps]
        if checkpoint is None or not steps:
            trainer.say("note: replay check: no logged step follows a checkpoint; none is compared")
            return
        here = trainer.step
        again = self._replay(checkpoint, len(steps))
        tolerance = self._tolerance(steps)
        before = {step: logged[step].metrics for step in steps}
        problem = first_difference(before, again, tolerance)
        if problem is None:
            exactly = f"within {tolerance:g}" if tolerance else "bit for bit"
            shown = f"steps {steps[0]:,} to {steps[-1]:,}" if steps[1:] else f"step {steps[0]:,}"
            trainer.say(f"replay check: {shown} repeated, the same {exactly}")
        else:
            self._tell(problem, checkpoint)
        newest = self._newest(here)
        assert newest is not None  # the one this start began with
        trainer.load_checkpoint(newest)

    def _newest(self, at_most: int) -> Checkpoint | None:
        """Return the newest checkpoint up to a step; the start has told of damaged ones."""
        folder, world = self.trainer.save_folder, self.trainer.world
        return newest_checkpoint(folder, world, lambda error: None, at_most=at_most)

    def _replay(self, checkpoint: Checkpoint, count: int) -> dict[int, dict[str, float]]:
        """Take `count` steps after a checkpoint; return their metrics by step."""
        trainer, buffer = self.trainer, MetricsBuffer()
        if checkpoint.step != trainer.step:  # else the state that training would go on with
            trainer.load_checkpoint(checkpoint)
        batches = iter(trainer.data_loader)
        for _ in range(count):
            metrics = trainer.take_step(next(batches))
            buffer.record(trainer.step, metrics)
        trainer.data_loader.close()
        return dict(buffer.collect(self.trainer.step))

    def _tolerance(self, steps: list[int]) -> float:
        if self.tolerance is not None:
            return self.tolerance
        world, folder = self.trainer.world, self.trainer.work_dir
        starts = world.on_main(lambda: read_starts(folder))
        same = all(ranks_of(step, starts) == world.size for step in steps)
        return 0.0 if same and world.device.type == "cpu" else OTHERWISE

    def _tell(self, problem: str, checkpoint: Checkpoint) -> None:
        if not self.strict:
            self.trainer.say(f"warning: replay check: {problem}")
            return
        raise ValidationError(
            f"replay check: {problem}",
            where=f"steps repeated from {checkpoint.folder}",
            why="this start does not compute what the run has computed; nothing was changed",
            fix="look for what is different: configuration (olm-train config --diff), versions, "
            "machine; if it is meant, --trainer.callbacks.replay_checker.strict=false goes on with "
            "a warning",
        )


def read_logged(folder: Path) -> dict[int, Step]:
    """Return the logged steps by number, with the metrics that are compared."""
    lines = read_metrics(folder, metrics=COMPARED)
    return {line.step: line for line in lines if isinstance(line, Step)}


def ranks_of(step: int, starts: list[Start]) -> int | None:
    """Return how many ranks logged a step: those of the last start before it, None if unknown."""
    return next((start.world_size for start in reversed(starts) if start.step < step), None)


def first_difference(
    logged: Mapping[int, Mapping[str, float | None]],
    again: Mapping[int, Mapping[str, float]],
    tolerance: NonNegativeFloat,
) -> str | None:
    """Return the first value that differs, in words, or None.

    Args:
        logged: metrics by step, as read: None is what was no number.
        again: the same steps, taken again.
        tolerance: relative to the logged value; 0: the same float64.
    """
    for step, metrics in sorted(again.items()):
        for name in COMPARED:
            was, now = logged[step].get(name), metrics[name]
            same = (
                not math.isfinite(now)
                if was is None
                else now == was or abs(now - was) <= tolerance * abs(was)
            )
            if not same:
                return f"step {step:,}: {name} is {now!r}, logged was {was!r}"
    return None
