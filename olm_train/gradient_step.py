"""The step of a train module: all of it but what is counted, and the loss of a micro-batch.

    micro-batches -> count (all ranks) -> [forward, loss / count, backward] * n
                  -> gradient norm -> finite? -> clip -> schedule -> optimiser step -> metrics

The loss of a step is a sum over the global batch divided by a count over the global batch. So it
does not depend on how the batch is cut into ranks and micro-batches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from olm_data.errors import UsageError
from olm_data.run_log.metric_names import CE_LOSS, GRAD_NORM, LR, NON_FINITE, STEP_SKIPPED
from olm_train.loss_context import LossTerms
from olm_train.model.shards import assign
from olm_train.optim.clip import as_scalar, clip_gradients, total_norm
from olm_train.optim.schedule_base import LRScaling, LRSchedule, Position
from olm_train.optim.state import class_name, set_values
from olm_train.parallel.apply import gradient_sync, reshard
from olm_train.stability.gate import FiniteGate, NonFinite, StepGuard, take_step
from olm_train.train_module_base import TrainModule


class Counted(NamedTuple):
    """This rank's part of a global batch.

    Attributes:
        micro: its micro-batches on the device, as `_loss_of` takes them.
        counts: int64 [n].
        names: of the metrics that are the sums of the first counts over all ranks.
        divisors: indices of the counts that the loss and its terms are divided by.
        known: other metrics, the same on each rank.
    """

    micro: Sequence[Any]
    counts: Tensor
    names: Sequence[str]
    divisors: Sequence[int] = (0,)
    known: Mapping[str, float] = {}


class MicroLoss(NamedTuple):
    """What a micro-batch adds to the loss of the global batch.

    Attributes:
        total: what is differentiated.
        logged: by metric, detached, to be summed over micro-batches and ranks; `CE_LOSS` is there.
        by_label: see `TrainModule.watch_losses`; None: not known.
    """

    total: Tensor
    logged: Mapping[str, Tensor]
    by_label: Tensor | None = None


class GradientStep(TrainModule):
    """A train module that lacks `_counted` and `_loss_of`, evaluation and state.

    A class derived from it sets what is annotated here, and gives each group of the optimiser its
    "peak_lr". `_peak` is that of the rate that is logged; None: the highest. `_reduce_each`:
    gradients are reduced after each micro-batch. `_stages`: ranks that have other parameters.
    """

    _forward: nn.Module
    _gate: FiniteGate
    _guard: StepGuard | None = None
    _scheduler: LRSchedule
    _scaling: LRScaling = LRScaling.none
    _max_grad_norm: float | None
    _peak: float | None = None
    _reduce_each: bool = False
    _stages: dist.ProcessGroup | None = None

    @abstractmethod
    def _counted(self, batches: Sequence[Any]) -> Counted:
        """Return the micro-batches of a step on the device, and what they are counted as."""

    @abstractmethod
    def _loss_of(self, batch: Any, divisors: Sequence[Tensor], terms: LossTerms) -> MicroLoss:
        """Return the loss of a micro-batch, divided by counts of the global batch."""

    def _each(
        self, micro: Sequence[Any], loss_of: Callable[[Any], MicroLoss]
    ) -> Iterator[MicroLoss]:
        """Take each micro-batch through the forward and backward pass, and yield its loss."""
        for i, batch in enumerate(micro):
            last = i == len(micro) - 1
            with gradient_sync(self._forward, last=last, each=self._reduce_each):
                part = loss_of(batch)
                part.total.backward()
            yield part

    @contextmanager
    def _passes(self, step: int) -> Iterator[Callable[[Tensor], None]]:
        """Around the forward and backward passes; gives what is called with `blocked` then."""
        yield lambda blocked: None

    def _watched(self, batch: Any, by_label: Tensor) -> tuple[Any, Tensor]:
        """Return what `watch_losses` is called with; every rank calls it."""
        return batch, by_label

    def _stepped(self, left_out: Tensor) -> Mapping[str, Tensor]:
        """Do what is done once a step, and return its metrics; every rank calls it.

        Args:
            left_out: scalar on the device, 1 if the weights stayed as they were.
        """
        return {}

    @property
    def non_finite(self) -> NonFinite:
        """What happens where loss or gradient norm is NaN or infinite."""
        return self._gate.policy

    def check_length(self, steps: int, tokens: int) -> None:
        """Refuse a run that the schedule does not fit.

        Raises:
            UsageError: a part of the schedule is longer than the run.
        """
        self._scheduler.factor(
            Position(step=steps, max_steps=steps, tokens=tokens, max_tokens=tokens)
        )

    def train_step(
        self,
        batches: Sequence[Any],
        step: int,
        max_steps: int,
        *,
        tokens: tuple[int, int] | None = None,
        batch_growth: float = 1.0,
    ) -> dict[str, Tensor | float]:
        """Take one optimiser step on this rank's micro-batches of a global batch.

        Args:
            batches: the same number on each rank, at least one; moved to the device if need be.
            step: the step to take, 1..max_steps.
            max_steps: length of the run, for the schedule.
            tokens: trained on after this step, and in the whole run, for a schedule in tokens.
            batch_growth: size of this global batch over that of the run's first, for the rate.

        Returns:
            Metrics of the global batch, the same on each rank; tensors stay on the device.
            By the names of `olm_data.run_log.metric_names`: losses, norm and NON_FINITE fp32,
            counts int64, rate float.
            Where NON_FINITE is 1, nothing was changed by this step, nor is by later ones unless
            the policy is `skip` or a state is loaded.
        """
        if not batches or not 1 <= step <= max_steps:
            raise ValueError(f"step {step} of {max_steps} with {len(batches)} micro-batches")
        micro, own, names, indices, known = self._counted(batches)
        counts = self.world.sum(own).unbind()
        # A global batch without one valid label has loss 0 and gradient 0, not 0 / 0.
        divisors = [counts[index].clamp(min=1).to(torch.float32) for index in indices]

        # Of the model and not of the optimiser, which may leave parameters alone. After a forward
        # pass without a backward one, as in an evaluation, FSDP2 still shows whole parameters in
        # place of the shards: clearing those would leave the gradients of the last step.
        reshard(self.model)
        self.model.zero_grad(set_to_none=True)
        sums = defaultdict[str, Tensor](lambda: torch.zeros((), device=self.world.device))
        terms = LossTerms(self.model, self.world)
        with self._passes(step) as settle:
            parts = self._each(micro, lambda batch: self._loss_of(batch, divisors, terms))
            for batch, part in zip(micro, parts, strict=True):
                if self.watch_losses is not None and part.by_label is not None:
                    self.watch_losses(*self._watched(batch, part.by_label))
                for name, value in part.logged.items():
                    sums[name] += value
        losses = {name: self.world.sum(value) for name, value in sums.items()}

        self.gradients_ready()
        norm = total_norm(self.model.parameters(), self._stages)
        grad_norm = as_scalar(norm).to(self.world.device)  # from the host with cpu_offload
        bad, blocked = self._gate.judge(losses[CE_LOSS], grad_norm)
        settle(blocked)
        clip_gradients(self.optimizer, norm, self._max_grad_norm, self._stages)
        if self._guard is not None:
            self._guard.push(losses[CE_LOSS], grad_norm)
        lr = self._set_lr(step, max_steps, tokens, batch_growth)
        with self._sharded_step():
            take_step(self.optimizer, blocked)
        metrics: dict[str, Tensor | float] = {**losses, GRAD_NORM: grad_norm, LR: lr}
        if self._guard is not None:
            metrics[STEP_SKIPPED] = blocked = self._guard.skipped()
        metrics |= {**dict(zip(names, counts, strict=False)), **known, NON_FINITE: bad}
        return terms.summed({**metrics, **self._stepped(blocked)})

    @torch.no_grad()
    def _put(self, pairs: Iterable[tuple[str, Any, Any]]) -> None:
        """Take over a state: (name, what is here, what is given), of tensors in place."""
        values = {}
        for name, target, source in pairs:
            if not isinstance(source, Tensor):
                values[name] = source
            elif isinstance(source, DTensor):
                target.copy_(source)
            else:
                assign(target, source)
        set_values(self.model, self.optimizer, values)
        self._gate.open()

    def _set_lr(
        self, step: int, max_steps: int, tokens: tuple[int, int] | None, batch_growth: float
    ) -> float:
        if tokens is None and self._scheduler.units == "tokens":
            raise ValueError("the schedule counts tokens: give train_step those of the run")
        seen, total = tokens or (0, 0)
        at = Position(step=step, max_steps=max_steps, tokens=seen, max_tokens=total)
        factor = self._scheduler.factor(at) * self._scaling.factor(batch_growth)
        for group in self.optimizer.param_groups:
            rate, old = group["peak_lr"] * factor, group["lr"]
            group["lr"] = torch.full_like(old, rate) if isinstance(old, Tensor) else rate
        peaks = [group["peak_lr"] for group in self.optimizer.param_groups]
        highest: float = max(peaks) if self._peak is None else self._peak
        return highest * factor

    @contextmanager
    def _sharded_step(self) -> Iterator[None]:
        """Around the optimiser's step: some of torch's compute what no DTensor can."""
        try:
            yield
        except (RuntimeError, NotImplementedError) as error:
            sharded = any(isinstance(p, DTensor) for p in self.model.parameters())
            if not sharded or not any(word in str(error) for word in ("harding", "DTensor")):
                raise
            name = class_name(self.optimizer)
            raise UsageError(
                f"{name} cannot take a step on sharded weights",
                where="dp_config",
                why=str(error).strip().partition("\n")[0],
                fix="share the weights by ddp, or choose another optimiser",
            ) from error
