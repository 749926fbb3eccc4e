"""Keeps an exponential moving average of the weights, and saves it as a checkpoint.

    post_step -> mean += (weights - mean) * (1 - decay)     on the device, sharded
    evaluate  -> step00000500-ema/, evaluated as `merged/ema/NAME`, at the end and at intervals

The first weights begin it, so it has no bias towards zero. Two fp32 tensors a weight, in the
checkpoints of the run too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta
from torch import Tensor

from olm_data.bounded_json import JsonObject
from olm_data.config.hints import NonNegativeInt, PositiveInt
from olm_data.decoding import convert
from olm_train.checkpoint.merged import Merge
from olm_train.extensions.averaging.averaged_weights import AveragingCallback, Suffix, weights_of
from olm_train.optim.averaging import RunningMean


class Average(msgspec.Struct, kw_only=True):
    """What a resumed run needs: the first step in the average, how many are, and the step of the
    last one that was written; `decay` is that of the steps so far."""

    first: int = 0
    count: int = 0
    written: int = 0
    decay: float = 0.0


@dataclass(kw_only=True)
class EMACallback(AveragingCallback):
    """Saves an exponential moving average of the weights as `stepNNNNNNNN-ema`.

    Attributes:
        enabled: average, where `ema` is given at all.
        decay: what remains of the average at each step; 0.999 looks back over about 1,000 steps.
        start_step: steps before the first one in the average.
        save_interval: steps between averages that are saved and evaluated; null: at the end alone.
        output_suffix: end of the folder's name.
    """

    enabled: bool = True
    decay: Annotated[float, Meta(ge=0, lt=1)] = 0.999
    start_step: NonNegativeInt = 0
    save_interval: PositiveInt | None = None
    output_suffix: Suffix = "ema"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._average = Average(decay=self.decay)
        self._mean: RunningMean | None = None

    def explicit_steps(self) -> dict[str, list[int]]:
        return {"start_step": [self.start_step + 1]}

    def state_dict(self) -> JsonObject:
        plain: JsonObject = msgspec.to_builtins(self._average)
        return plain

    def load_state_dict(self, state: JsonObject) -> None:
        self._average = convert(state, Average)
        self._mean = None

    def tensors(self) -> dict[str, Tensor]:
        return self._running().tensors if self._average.count else {}

    def pending(self) -> list[str]:
        return ["average of the weights"] if self._is_due() else []

    def pre_train(self) -> None:
        super().pre_train()
        average, trainer = self._average, self.trainer
        if average.count and average.first + average.count - 1 != trainer.step:
            trainer.say(f"note: the average of the weights begins anew after step {trainer.step:,}")
            self._average, self._mean = Average(decay=self.decay), None
        elif average.count and average.decay != self.decay:
            trainer.say(
                f"note: the average decays by {self.decay:g} from here, not {average.decay}"
            )
        self._average.decay = self.decay

    def post_step(self) -> None:
        average, step = self._average, self.trainer.step
        if step <= self.start_step:
            return
        if not average.count:
            average.first = step
            if step > self.start_step + 1:
                self.trainer.say(f"note: the average of the weights begins with step {step:,}")
        average.count += 1
        part = 1 if average.count == 1 else 1 - self.decay
        self._running().update(weights_of(self.trainer.train_module), part)

    def evaluate(self) -> None:
        if self._is_due() and not self._failed:
            self._write(raise_on_error=False)

    def post_train(self) -> None:
        if self._is_due(ended=True):
            self._write(raise_on_error=True)

    def _is_due(self, *, ended: bool = False) -> bool:
        average, each, trainer = self._average, self.save_interval, self.trainer
        step = trainer.step
        ended |= step >= trainer.stop_step
        due = ended or (each is not None and step % each == 0)
        missing = due and average.count > 0 and average.written != step
        return missing and not (ended and self.is_evaluated())

    def _running(self) -> RunningMean:
        if self._mean is None:
            self._mean = self.new_mean()
        return self._mean

    def _write(self, *, raise_on_error: bool) -> None:
        average, step = self._average, self.trainer.step
        merge = Merge(
            weights="ema",
            first=average.first,
            last=step,
            count=average.count,
            decay=self.decay,
        )
        ended = step >= self.trainer.stop_step
        otherwise = "it is tried again" if ended else f"no average of step {step:,} is saved"
        if self.save(self._running(), merge, raise_on_error=raise_on_error, otherwise=otherwise):
            average.written = step
