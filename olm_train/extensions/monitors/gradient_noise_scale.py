"""The gradient noise scale (McCandlish et al., 2018, "An Empirical Model of Large-Batch Training").

    gradient of each micro-batch of each rank, before it is added up: |g_i|^2, n_i labels
    gradient of the global batch, before clipping:                    |G|^2,   N labels

With g_i the share of micro-batch i in G, and labels drawn independently, over m micro-batches

    S = sum_i N / n_i |g_i|^2          E[S]     = |G_true|^2 + m variance / N
                                       E[|G|^2] = |G_true|^2 +   variance / N

so both unknowns follow without bias, for micro-batches of any sizes; smoothed each, their ratio is
B_simple = variance / |G_true|^2, in labels. Below it twice the batch trains almost twice as well a
step; far above it more data a step are wasted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
import torch
from msgspec import Meta
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from olm_data.bounded_json import JsonObject
from olm_data.config.hints import PositiveInt
from olm_data.decoding import convert
from olm_data.errors import UsageError
from olm_data.run_log.metric_names import (
    GRAD_NORM,
    LABELS,
    MICRO_BATCHES,
    MICRO_NORMS,
    NOISE_SCALE,
    NOISE_SIGNAL,
    NOISE_VARIANCE,
)
from olm_train.callbacks.base import Callback
from olm_train.data.batch import Batch
from olm_train.model.loss import count_valid
from olm_train.model.shards import tensor_cut
from olm_train.parallel.expert import DealtExperts


class Smoothed(msgspec.Struct, kw_only=True):
    """What a resumed run needs: sums that decay, and that of their weights."""

    signal: float = 0.0
    variance: float = 0.0
    weight: float = 0.0


@dataclass(kw_only=True)
class GradientNoiseScaleCallback(Callback):
    """Logs `optim/gradient noise scale` in labels, with the two estimates it is the ratio of.

    Each micro-batch of each rank is a sample, so there must be two of them in a step.

    Attributes:
        enabled: estimate, where `gradient_noise_scale` is given at all.
        interval: steps from one sample to the next.
        smoothing: what the averages keep of themselves at a sample.
    """

    whole_model: ClassVar[bool] = True

    enabled: bool = True
    interval: PositiveInt = 1
    smoothing: Annotated[float, Meta(ge=0, lt=1)] = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        self._state = Smoothed()
        self._sums: Tensor | None = None  # |g_i|^2 by micro-batch of this rank, float64
        self._labels: Tensor | None = None
        self._passes: list[int] = []  # backward passes each parameter has seen in this step
        self._handles: list[Any] = []
        self._said = False

    def state_dict(self) -> JsonObject:
        return msgspec.to_builtins(self._state)

    def load_state_dict(self, state: JsonObject) -> None:
        self._state = convert(state, Smoothed)

    def pre_train(self) -> None:
        model = self.trainer.train_module.model
        instead = {}
        if any(tensor_cut(each) is not None for each in model.parameters()):
            instead["tp_config"] = "a rank has that of parts of matrices"
        elif self.trainer.world.sharers > 1:
            instead["cp_config"] = "a rank has that of a part"
        if any(isinstance(getattr(m, "through", None), DealtExperts) for m in model.modules()):
            instead["ep_config"] = "a rank has that of its experts, of all ranks' micro-batches"
        for option, why in instead.items():
            raise UsageError(
                "gradient_noise_scale needs the gradient of a whole micro-batch on each rank",
                where="trainer.callbacks.gradient_noise_scale",
                why=f"with train_module.{option} {why}",
                fix="leave one of the two out",
            )
        wrapped = [each for each in model.modules() if isinstance(each, FSDPModule)]
        # Whole parameters are those that the backward pass gives gradients to, on this rank alone.
        for module in wrapped:
            module.unshard()
        parameters = [each for each in model.parameters() if each.requires_grad]
        self._passes = [0] * len(parameters)
        self._handles = [
            each.register_hook(partial(self._see, number)) for number, each in enumerate(parameters)
        ]
        for module in wrapped:
            module.reshard()

    def pre_step(self, batches: Sequence[Any]) -> None:
        self._sums = None
        if (self.trainer.step + 1) % self.interval:
            return
        if not all(isinstance(batch, Batch) for batch in batches):
            raise UsageError(
                "gradient_noise_scale needs micro-batches with labels",
                where="trainer.callbacks.gradient_noise_scale",
                fix="leave it out with batches of another kind",
            )
        device = self.trainer.world.device
        self._sums = torch.zeros(len(batches), dtype=torch.float64, device=device)
        self._labels = torch.stack([count_valid(batch.labels) for batch in batches]).to(device)
        self._passes = [0] * len(self._passes)

    def post_step(self) -> None:
        if self._sums is None or self._labels is None:
            return
        labels = self._labels.to(torch.float64)
        norms = torch.where(labels > 0, self._sums / labels.clamp(min=1), 0.0).sum()
        found = self.trainer.world.sum(torch.stack([norms, (labels > 0).sum().to(norms.dtype)]))
        self.trainer.record_metric(MICRO_NORMS, found[0])
        self.trainer.record_metric(MICRO_BATCHES, found[1])
        self._sums = None

    def pre_log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        norms, count = metrics.pop(MICRO_NORMS, None), metrics.pop(MICRO_BATCHES, 0.0)
        if norms is None:
            return
        if count < 2:
            if not self._said:
                self.trainer.say(
                    "note: gradient_noise_scale has nothing to compare: a step is one micro-batch; "
                    "make rank_microbatch_size smaller"
                )
            self._said = True
            return
        labels, whole = metrics[LABELS], metrics[GRAD_NORM] ** 2
        signal, variance = estimate(norms * labels, whole, labels, count)
        state, keep = self._state, self.smoothing
        if not torch.isfinite(torch.tensor([signal, variance])).all():
            return
        state.signal = keep * state.signal + (1 - keep) * signal
        state.variance = keep * state.variance + (1 - keep) * variance
        state.weight = keep * state.weight + (1 - keep)
        metrics[NOISE_SIGNAL] = state.signal / state.weight
        metrics[NOISE_VARIANCE] = state.variance / state.weight
        if state.signal > 0:
            metrics[NOISE_SCALE] = state.variance / state.signal

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._sums = [], None

    def _see(self, number: int, gradient: Tensor) -> None:
        """Take the gradient of a parameter of one micro-batch; it goes on as it is."""
        if self._sums is None:
            return
        place = self._passes[number]
        self._passes[number] += 1
        if place < len(self._sums):
            norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
            self._sums[place] += norm.to(torch.float64) ** 2


def estimate(
    sum_of_norms: float, norm: float, labels: float, micro_batches: float
) -> tuple[float, float]:
    """Return unbiased estimates of |G_true|^2 and of the variance of one label's gradient.

    Args:
        sum_of_norms: S, sum over micro-batches of N / n_i |g_i|^2.
        norm: |G|^2 of the global batch.
        labels: N.
        micro_batches: those with labels, at least 2.
    """
    variance = (sum_of_norms - norm) * labels / (micro_batches - 1)
    return norm - variance / labels, variance
