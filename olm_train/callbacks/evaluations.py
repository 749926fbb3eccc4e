"""When a run is evaluated: what `lm_evaluator` and `downstream_evaluator` share.

evaluate -> what is due and not made -> measured, on all ranks -> logged with the step
         `-> a signal in the middle: nothing is logged, it is made after the restart
the last step has no restart: its checkpoint is saved first, and the evaluation finished
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from olm_data.bounded_json import JsonObject
from olm_data.config.hints import PositiveInt
from olm_data.run_log.log import Evaluation, read_metrics
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.manifest import Kind


@dataclass(kw_only=True)
class EvaluationSteps(Callback):
    """A callback that looks at the model after some steps."""

    enabled: bool = True
    eval_interval: PositiveInt = 1000
    fixed_steps: list[PositiveInt] | None = None
    eval_on_startup: bool = False
    eval_on_finish: bool = True

    def explicit_steps(self) -> dict[str, list[int]]:
        only = not (self.fixed_steps or self.eval_on_startup or self.eval_on_finish)
        return {
            "fixed_steps": self.fixed_steps or [],
            "eval_interval": [self.eval_interval] if only else [],
        }

    def is_due(self) -> bool:
        """Whether it looks at the model after this step."""
        step = self.trainer.step
        due = step % self.eval_interval == 0 and step > 0
        due |= step in (self.fixed_steps or ())
        due |= self.eval_on_startup and step == 0
        return due or (self.eval_on_finish and step >= self.trainer.stop_step)


@dataclass(kw_only=True)
class Evaluations(EvaluationSteps):
    """Evaluates at some steps.

    Attributes:
        enabled: evaluate, where it is given at all.
        eval_interval: steps between evaluations.
        fixed_steps: further steps after which to evaluate.
        eval_on_startup: also before the first step.
        eval_on_finish: also after the last step.
        cancel_after_first_eval: end the run after the first evaluation, see `trainer.on_cancel`.
    """

    called: ClassVar[str]
    """Name of the callback, for messages."""

    cancel_after_first_eval: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._last = -1
        self._made: dict[str, str] = {}  # digest of what was evaluated on after step `_last`

    @abstractmethod
    def folders(self) -> Mapping[str, str]:
        """Return the folder of what is evaluated on by the name in the log."""

    @abstractmethod
    def digest(self, name: str, folder: str) -> str:
        """Return the digest of what lies in a folder; raises what opening it raises."""

    @abstractmethod
    def measure(self, name: str, stop: Callable[[], bool] | None) -> dict[str, float] | None:
        """Return the metrics of the model as it is now; None where `stop` said so."""

    def keep(self, names: Sequence[str]) -> None:  # a default, and a good one
        """Keep what is to be kept of evaluations besides the log; called before they are logged."""

    def state_dict(self) -> JsonObject:
        return {"last": self._last, "made": dict(self._made)}

    def load_state_dict(self, state: JsonObject) -> None:
        self._last, self._made = state["last"], dict(state.get("made", {}))

    def pending(self) -> list[str]:
        """Return what was not there when the run ended."""
        trainer = self.trainer
        left, folders = self._due(), self.folders()
        for name in folders.keys() & self._made.keys():
            digest = self.digest(name, folders[name])
            if self._made[name] != digest:
                trainer.say(
                    f"note: the evaluation {name} of step {self._last:,} was made on another data "
                    f"set ({self._made[name][:12]}, here {digest[:12]}) and is not made again; "
                    "give the new one another name"
                )
        return [f"evaluation {name}" for name in left]

    def _due(self) -> list[str]:
        """Return what is to be evaluated on after this step and has not been."""
        step, ended = self.trainer.step, self.trainer.step >= self.trainer.stop_step
        due = self.is_due()
        made = self._made.keys() if step == self._last else set()
        names = [name for name in self.folders() if due and name not in made]
        if names and (made or ended):  # evaluations of a run that has ended are in its log alone
            folder = self.trainer.work_dir
            known = self.trainer.world.on_main(lambda: evaluated(folder, step))
            names = [name for name in names if name not in known]
        return names

    def evaluate(self) -> None:
        trainer, step = self.trainer, self.trainer.step
        names = self._due()
        if not names:
            return
        with trainer.pause():
            results = self._evaluate(names)
        if results is None and step >= trainer.stop_step:
            # No start comes after the last step that could make it: save first, then finish it.
            trainer.save_checkpoint(Kind.final, wait=True)
            with trainer.pause():
                results = self._evaluate(names, ignore_stop=True)
        if results is not None:
            before = self._made if self._last == step else {}
            folders = self.folders()
            made = {name: self.digest(name, folders[name]) for name in names}
            self._last, self._made = step, {**before, **made}
            self.keep(names)
            trainer.log_evaluation(results)
            if self.cancel_after_first_eval:
                trainer.cancel_run("the first evaluation is made", by=self.called)

    def evaluate_now(self, *, ignore_stop: bool = False) -> dict[str, dict[str, float]] | None:
        """Return results of the model as it is now; None where a signal came meanwhile."""
        return self._evaluate(list(self.folders()), ignore_stop=ignore_stop)

    def _evaluate(
        self, names: Sequence[str], *, ignore_stop: bool = False
    ) -> dict[str, dict[str, float]] | None:
        """Return the results, or None when a signal came: then they are made after the restart.

        Args:
            names: of what is evaluated on.
            ignore_stop: whatever signal comes.
        """
        results = {}
        for name in names:
            found = self.measure(name, None if ignore_stop else self.trainer.ask_to_stop)
            if found is None:
                return None
            results[name] = found
        return results


def evaluated(folder: Path, step: int) -> set[str]:
    """Return the data sets that the log of a run has results of after `step`."""
    lines = (line for line in read_metrics(folder) if isinstance(line, Evaluation))
    return {name for line in lines if line.step == step for name in line.results}
