"""Steps of other sizes as a run goes on: batch-size warm-up.

    batch_sizes, schedule -> StepSizes -> data loader, which counts steps and deals out rows by them

Sizes follow from the configuration alone. `train_module.lr_batch_scaling` says what the learning
rate does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from olm_data.config.hints import PositiveInt
from olm_data.errors import UsageError
from olm_data.order.steps import StepSizes
from olm_train.callbacks.base import Callback
from olm_train.duration import Duration, DurationUnit


@dataclass(kw_only=True)
class BatchSizeSchedulerCallback(Callback):
    """[Later sizes](#batch-size-schedules) of the global batch.

    Attributes:
        enabled: change the size, where `batch_size_scheduler` is given at all.
        batch_sizes: tokens of one step over all ranks, in order; the first is that of
            `data_loader.global_batch_size`.
        schedule: what is trained before the first step of each size, in steps, tokens or
            chinchilla: `{value: 0, unit: steps}` for the first one.
    """

    enabled: bool = True
    batch_sizes: list[PositiveInt] = field(default_factory=list)
    schedule: list[Duration] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.batch_sizes) != len(self.schedule):
            raise UsageError(
                f"{len(self.batch_sizes)} batch_sizes have {len(self.schedule)} beginnings",
                where="schedule",
                fix="give one for each",
            )
        if self.schedule and self.schedule[0].value != 0:
            raise UsageError(
                f"the first size begins after {self.schedule[0]}",
                where="schedule",
                fix="begin with {value: 0, unit: steps}",
            )
        if any(begin.unit is DurationUnit.epochs for begin in self.schedule):
            raise UsageError(
                "how long an epoch is depends on the sizes of its steps",
                where="schedule",
                fix="give steps, tokens or chinchilla",
            )

    def sizes(self, global_batch_size: int, num_params: int) -> StepSizes:
        """Return the tokens of each step.

        Args:
            global_batch_size: of the data loader.
            num_params: parameters of the model.

        Raises:
            UsageError: the first size is another one, or the steps are not in order.
        """
        sizes = StepSizes.constant(global_batch_size)
        if self.batch_sizes and self.batch_sizes[0] != global_batch_size:
            raise UsageError(
                f"the first of the batch_sizes is {self.batch_sizes[0]:,}, and "
                f"data_loader.global_batch_size {global_batch_size:,}",
                where="trainer.callbacks.batch_size_scheduler.batch_sizes",
                fix="make them the same",
            )
        for size, begin in list(zip(self.batch_sizes, self.schedule, strict=True))[1:]:
            first = begin.to_steps(batch_sizes=sizes, steps_per_epoch=0, num_params=num_params)
            sizes = sizes.then(first, size)
        return sizes

    def explicit_steps(self) -> dict[str, list[int]]:
        return {"schedule": [step for step, _ in self.trainer.data_loader.batch_sizes.changes]}

    def post_attach(self) -> None:
        trainer = self.trainer
        if hasattr(trainer, "stop_step"):
            raise UsageError(
                "the batch_size_scheduler comes too late: the length of the run is known",
                fix="give it to the Trainer as one of its `callbacks`",
            )
        loader = trainer.data_loader
        loader.schedule_sizes(self.sizes(loader.global_batch_size, trainer.train_module.num_params))
