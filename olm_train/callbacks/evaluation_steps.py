"""The steps after which a callback looks at the model: those of evaluations and of samples."""

from __future__ import annotations

from dataclasses import dataclass

from olm_data.config.hints import PositiveInt
from olm_train.callbacks.base import Callback


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
