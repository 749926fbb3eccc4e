"""Throughput: tokens a second, waiting for data, and model FLOP/s utilisation where it is known.

Measured from one read of the metrics to the next, because only there is the device known to have
finished; evaluations and checkpoints are left out. Utilisation counts the query-key pairs that the
document mask left, and is not reported for a device whose peak is not in the table.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta

from olm_data.config.hints import PositiveFloat, PositiveInt
from olm_data.errors import UsageError
from olm_data.run_log.metric_names import (
    ATTENTION_PAIRS,
    DATA_WAIT_SECONDS,
    DATA_WAIT_SHARE,
    MFU,
    SECONDS_PER_STEP,
    TOKENS,
    per_second,
)
from olm_train.callbacks.base import Callback
from olm_train.estimate.gpus import device_peak_flops


@dataclass(kw_only=True)
class SpeedMonitorCallback(Callback):
    """Throughput metrics, added to those of the last step of each window.

    The first step of a run warms up caches and compilers and is in no window.

    Attributes:
        enabled: measure throughput.
        num_flops_per_token: FLOPs of a token in a training step; default: those of the model, where
            they are known.
        num_params: parameters that take 6 FLOPs a token each, in place of that.
        device_peak_flops_per_second: of one device; default: from a table, by its name.
        data_wait_alarm: share of the time waited for data above which a warning is printed.
    """

    priority: ClassVar[int] = 1  # its metrics are there when the console prints

    enabled: bool = True
    num_flops_per_token: PositiveFloat | None = None
    num_params: PositiveInt | None = None
    device_peak_flops_per_second: PositiveFloat | None = None
    data_wait_alarm: Annotated[float, Meta(gt=0, le=1)] = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_params is not None and self.num_flops_per_token is not None:
            raise UsageError(
                "has no effect beside num_flops_per_token",
                where="num_params",
                fix="leave one of them out",
            )
        self._window: tuple[int, float, float, float] | None = None
        self._pairs = self._tokens = 0.0

    def pre_train(self) -> None:
        self._window = None  # a run may go back and start again

    def post_step(self) -> None:
        if self._window is None:
            self._open_window()

    def pre_log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self._pairs += metrics.get(ATTENTION_PAIRS, 0.0)
        self._tokens += metrics.get(TOKENS, 0.0)
        if self._window is None or step != self.trainer.step or step == self._window[0]:
            return
        first, start, waited, paused = self._window
        steps = step - first
        seconds = time.monotonic() - start - (self.trainer.paused_seconds - paused)
        wait = self.trainer.data_loader.data_wait_seconds - waited
        tokens = self.trainer.tokens_at(step) - self.trainer.tokens_at(first)
        metrics[per_second(self.trainer.data_loader.unit)] = tokens / seconds
        metrics[SECONDS_PER_STEP] = seconds / steps
        metrics[DATA_WAIT_SECONDS] = wait
        metrics[DATA_WAIT_SHARE] = wait / seconds
        if wait > self.data_wait_alarm * seconds:
            self.trainer.say(
                f"warning: steps {first + 1:,} to {step:,} waited {wait:.1f} s of {seconds:.1f} s "
                f"({wait / seconds:.0%}) for data: storage is slower than training"
            )
        utilisation = self._utilisation(tokens / seconds)
        if utilisation is not None:
            metrics[MFU] = utilisation
        self._open_window()

    def _open_window(self) -> None:
        trainer = self.trainer
        self._window = (
            trainer.step,
            time.monotonic(),
            trainer.data_loader.data_wait_seconds,
            trainer.paused_seconds,
        )
        self._pairs = self._tokens = 0.0

    def _utilisation(self, tokens_per_second: float) -> float | None:
        """Return the share of the devices' peak that the model used; None where it is not known."""
        world, peak = self.trainer.world, self.device_peak_flops_per_second
        if peak is None and world.device.type == "cuda":
            peak = device_peak_flops(torch.cuda.get_device_name(world.device))
        flops = self._flops_per_token()
        if peak is None or flops is None or self.trainer.data_loader.unit != "tokens":
            return None
        return tokens_per_second * flops / (peak * world.size)

    def _flops_per_token(self) -> float | None:
        if self.num_flops_per_token is not None:
            return self.num_flops_per_token
        if self.num_params is not None:
            return 6.0 * self.num_params
        if not self._tokens:
            return None
        return self.trainer.train_module.flops_per_token(self._pairs / self._tokens)
