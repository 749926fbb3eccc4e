"""The learning rates of parameter groups that have rates of their own, in the log of each step.

`optim/lr` is in the metrics of every step already; these are added where groups differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.optim import Optimizer

from olm_data.run_log.metric_names import lr_of_group
from olm_train.callbacks.base import Callback


@dataclass(kw_only=True)
class LRMonitorCallback(Callback):
    """Logs `optim/lr (group N)`, the rate that the step was taken with; any optimiser's.

    Attributes:
        enabled: log the rates of groups whose rates differ.
    """

    enabled: bool = True

    def post_step(self) -> None:
        for name, rate in group_rates(self.trainer.train_module.optimizer).items():
            self.trainer.record_metric(name, rate)


def group_rates(optimizer: Optimizer) -> Mapping[str, float]:
    """Return the rate of each group by the name of its metric; empty where they have one."""
    groups = optimizer.param_groups
    if len({float(group.get("peak_lr", group["lr"])) for group in groups}) == 1:
        return {}
    return {lr_of_group(number): float(group["lr"]) for number, group in enumerate(groups)}
