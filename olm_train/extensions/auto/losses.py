"""The loss of each step of a run, for who called it: those before a resume from its log."""

from __future__ import annotations

from collections.abc import Mapping

from olm_data.run_log.log import Step, read_metrics
from olm_data.run_log.metric_names import CE_LOSS
from olm_train.callbacks.base import Callback


class Losses(Callback):
    """Keeps the loss of each step, on every rank.

    Attributes:
        by_step: in nats, by step.
    """

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def pre_train(self) -> None:
        run = self.trainer
        if run.resumed:
            self.by_step |= run.world.on_main(self._logged)
        self.by_step = {step: loss for step, loss in self.by_step.items() if step <= run.step}

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.by_step[step] = metrics[CE_LOSS]

    def _logged(self) -> dict[int, float]:
        lines = read_metrics(self.trainer.work_dir, metrics=(CE_LOSS,))
        losses = {line.step: line.metrics.get(CE_LOSS) for line in lines if isinstance(line, Step)}
        return {step: loss for step, loss in losses.items() if loss is not None}
