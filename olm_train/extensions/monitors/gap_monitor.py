"""Statistics of gradients, activations and parameters (GAP), and gradients on disk.

    pre_step       begin to look at activations
    post_backward  gradients before clipping, parameters before the step; gradients to disk
    post_step      updates, optimiser state -> one all-reduce -> gap/TARGET/NAME/KIND

Between the steps that are looked at, it does nothing. Training has the same bits with and without.

Rows of the activations of one step and of their gradients, over its micro-batches.

    begin: blocks run `watched` instead of `forward`, and keep rows and slots
    end: forward again -> Rows of activations, Rows of activation gradients

Used on the steps that are looked at only; on the others a model runs as if this were not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from olm_data.config.hints import Needs, NonNegativeInt, PositiveInt
from olm_data.errors import UsageError
from olm_data.run_log.metric_names import statistic_of
from olm_train.callbacks.base import Callback
from olm_train.distributed.world import World
from olm_train.extensions.monitors.gradient_files import write_gradients
from olm_train.model.decoder import Decoder
from olm_train.model.shards import is_first_holder, like, local_part
from olm_train.model.tap import NO_TAP, ROW, Tap, Watcher, names_within

SMALLEST_NORMAL = torch.finfo(torch.bfloat16).tiny
"""What is smaller loses bits in bfloat16, and is 0 to kernels that flush subnormal numbers."""
SMALL = 1 << 16
"""Elements up to which a tensor is copied to float64 to be measured."""
COLUMNS = 6


class TensorRows(NamedTuple):
    """What this rank knows of some tensors.

    Attributes:
        sums: float64 [n, COLUMNS], see above; 0 where another rank counts the same elements.
        largest: float64 [n], largest absolute value; 0 likewise.
    """

    sums: Tensor
    largest: Tensor


class Statistics(NamedTuple):
    """Of n tensors, each float64 [n]; NaN where a tensor has none of it.

    Attributes:
        max: largest absolute value.
        mean, var, rms: mean, variance (n - 1 in the denominator), root of the mean square.
        zeros, underflow: shares of all elements.
    """

    max: Tensor
    mean: Tensor
    var: Tensor
    rms: Tensor
    zeros: Tensor
    underflow: Tensor


@torch.no_grad()
def measure(
    tensors: Sequence[Tensor],
    world: World,
    *,
    local: Sequence[Tensor] | None = None,
    underflows: Sequence[Tensor] | None = None,
) -> TensorRows:
    """Return the rows of whole or sharded tensors, on the device of the world.

    Args:
        tensors: of floating-point numbers; DTensors are measured where they lie.
        local: look at these, cut as this rank's parts of `tensors`, and not at those.
        underflows: of each local part the number of elements that count as such; None: nobody asks.
    """
    parts = [local_part(tensor) for tensor in tensors] if local is None else list(local)
    sums = torch.zeros(len(parts), COLUMNS, dtype=torch.float64, device=world.device)
    largest = torch.zeros(len(parts), dtype=torch.float64, device=world.device)
    here = [
        i
        for i, part in enumerate(parts)
        if part.numel() and is_first_holder(tensors[i], main=world.main)
    ]
    if not here:
        return TensorRows(sums, largest)
    rows = torch.stack(
        [_row(parts[i], None if underflows is None else underflows[i]) for i in here]
    )
    maxima = torch._foreach_norm([parts[i] for i in here], torch.inf)
    maximum = torch.stack([each.to(torch.float64) for each in maxima])
    index = torch.tensor(here).to(world.device, non_blocking=True)
    sums[index] = rows.to(world.device, non_blocking=True)
    largest[index] = maximum.to(world.device, non_blocking=True)
    return TensorRows(sums, largest)


@torch.no_grad()
def underflows_of(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return of each part the number of elements that are not 0 but below SMALLEST_NORMAL."""
    return [((part != 0) & (part.abs() < SMALLEST_NORMAL)).sum() for part in parts]


@torch.no_grad()
def lost_updates(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
    """Return of each part the number of elements that changed, but not their bfloat16 rounding."""
    kind = torch.bfloat16
    return [
        ((a != b) & (a.to(kind) == b.to(kind))).sum() for a, b in zip(before, after, strict=True)
    ]


def finish(rows: TensorRows, world: World, *, averaged: int = 0) -> Statistics:
    """Return the statistics of the whole tensors, the same on each rank.

    Args:
        rows: of this rank. Every rank calls it; one all-reduce.
        averaged: so many of the last rows are activations: their means and variances are averages
            over the rows of a batch, and they have no other statistics but the maximum.
    """
    sums, largest = rows
    if world.size > 1:
        columns = torch.zeros(len(largest), world.size, dtype=torch.float64, device=sums.device)
        columns[:, world.rank] = largest
        packed = world.sum(torch.cat([sums, columns], 1))
        sums, largest = packed[:, :COLUMNS], packed[:, COLUMNS:].amax(1)
    count, total, inside, of_means, zeros, underflow = sums.unbind(1)
    mean = total / count
    between = (of_means - total * mean).clamp(min=0)
    var = torch.where(count > 1, (inside + between) / (count - 1), torch.nan)
    if averaged:
        var[-averaged:] = inside[-averaged:] / count[-averaged:]
    rms = ((inside + of_means) / count).sqrt()
    return Statistics(largest, mean, var, rms, zeros / count, underflow / count)


def _row(part: Tensor, lost: Tensor | None) -> Tensor:
    count = part.numel()
    if count <= SMALL:
        part = part.to(torch.float64)
    elif part.dtype != torch.float64:
        part = part.to(torch.float32)
    mean = part.sum(dtype=torch.float64) / count
    inside = part.var(correction=0).to(torch.float64) * count
    zeros = count - torch.count_nonzero(part)
    under = torch.zeros_like(mean) if lost is None else lost
    numbers = (
        torch.full_like(mean, count),
        mean * count,
        inside,
        mean * mean * count,
        zeros,
        under,
    )
    return torch.stack([number.to(torch.float64) for number in numbers])


class ActivationProbe:
    """Looks at the activations of a decoder.

    Args:
        model: whole or sharded, compiled or not.
        gradients: look at their gradients too.

    Attributes:
        names: of what it may see, `blocks.0.attention.w_out`; each has a row, which stays zero for
            what is not seen.
    """

    def __init__(self, model: Decoder, *, gradients: bool) -> None:
        self._model, self._gradients = model, gradients
        self._within = [names_within(block) for block in model.blocks]
        self.names = ["embeddings", "norm"]
        for number, names in enumerate(self._within):
            self.names += [f"blocks.{number}.{name}".rstrip(".") for name in names]
        self._rows: Tensor | None = None
        self._slots: list[tuple[int, Tensor]] = []
        self._forwards: list[Any] = []

    def begin(self, device: torch.device) -> None:
        """Look from here on."""
        assert not self._forwards
        self._rows = torch.zeros(len(self.names), ROW, device=device)
        self._model.tap = _Outside(self)
        first = 2
        for block, names in zip(self._model.blocks, self._within, strict=True):
            self._forwards.append(vars(block).get("forward"))
            vars(block)["forward"] = _Watched(self, block, first, len(names))
            first += len(names)

    def end(self) -> tuple[Tensor, Tensor]:
        """Look no longer.

        Returns:
            Rows fp32 [len(names), ROW] of this rank's activations and of their gradients.
        """
        self._model.tap = NO_TAP
        for block, forward in zip(self._model.blocks, self._forwards, strict=False):
            if forward is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = forward
        assert self._rows is not None
        rows, gradients = self._rows, torch.zeros_like(self._rows)
        for first, slots in self._slots:
            if slots.grad is not None:
                _add(gradients[first : first + len(slots)], slots.grad)
        self._rows, self._slots, self._forwards = None, [], []
        return rows, gradients

    def slots(self, first: int, count: int) -> Tensor:
        """Return new slots for `count` activations, from number `first` on."""
        assert self._rows is not None
        slots = torch.zeros(count, ROW, device=self._rows.device, requires_grad=self._gradients)
        self._slots.append((first, slots))
        return slots

    def keep(self, first: int, rows: Tensor) -> None:
        """Add the rows that a forward pass has seen, from number `first` on."""
        assert self._rows is not None
        _add(self._rows[first : first + len(rows)], rows.detach())


class _Watched:
    """The forward function of a block that is looked at."""

    def __init__(self, probe: ActivationProbe, block: nn.Module, first: int, count: int) -> None:
        self._probe, self._block, self._place = probe, block, (first, count)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        block: Any = self._block
        x, rows = block.watched(self._probe.slots(*self._place), *args, **kwargs)
        self._probe.keep(self._place[0], rows)
        return x


class _Outside(Tap):
    """Looks at what is outside the blocks."""

    def __init__(self, probe: ActivationProbe) -> None:
        self._probe = probe

    def __call__(self, name: str, x: Tensor) -> Tensor:
        place = self._probe.names.index(name)
        watcher = Watcher((name,), self._probe.slots(place, 1))
        x = watcher(name, x)
        self._probe.keep(place, torch.stack(watcher.rows))
        return x


def as_rows(activations: Sequence[Tensor]) -> TensorRows:
    """Return ROWs of activations as rows to be finished together with those of tensors.

    Mean and variance are those within a row of a batch, averaged over its rows.
    """
    each = torch.cat(list(activations)).to(torch.float64)
    sums = torch.zeros(len(each), COLUMNS, dtype=torch.float64, device=each.device)
    sums[:, :3] = each[:, :3]
    return TensorRows(sums, each[:, 3])


def _add(own: Tensor, rows: Tensor) -> None:
    own[:, :3] += rows[:, :3]
    own[:, 3] = torch.maximum(own[:, 3], rows[:, 3])


Target = Literal["params", "grads", "updates", "opt_state", "activations", "activation_grads"]
Kind = Literal["max", "mean", "var", "rms", "zeros", "underflow", "ratio"]

OF_ACTIVATIONS = ("max", "mean", "var")
"""Kinds that activations and their gradients have."""
ACTIVATIONS: tuple[Target, ...] = ("activations", "activation_grads")

_OF_DUMPS = Needs("dump_gradients")


@dataclass(kw_only=True)
class GAPMonitorCallback(Callback):
    """Logs `gap/TARGET/NAME/KIND` for parameters and modules, by their names in the model.

    Attributes:
        enabled: look, where `gap_monitor` is given at all.
        monitor: log statistics; default: yes.
        interval: steps from one look to the next.
        targets: what is looked at. `grads` are those of the global batch before clipping; `updates`
            what the step added to the parameters; `opt_state` tensors of the optimiser with the
            shape of their parameter. Activations are those of the decoder.
        kinds: `max` of the absolute values, `mean`, `var` (n - 1), `rms`, share of `zeros`, share
            of `underflow`: not 0 but below the smallest normal bfloat16, 1.2e-38, and of updates
            those that change the parameter but not its rounding to bfloat16; `ratio`, of updates:
            their rms over that of the parameter. Activations have the first three, within a row of
            the batch and averaged over rows.
        dump_gradients: write gradients to `gradients/` in the work folder; default: no.
        dump_gradients_start_step: the first step that is written.
        dump_gradients_end_step: the last one; default: that of the run.
        dump_gradients_step_interval: steps from one to the next.
        dump_gradients_save_first_n: keep this many entries of each dimension; default: all.
    """

    whole_model: ClassVar[bool] = True

    enabled: bool = True
    monitor: bool | None = None
    interval: PositiveInt = 100
    targets: list[Target] = field(
        default_factory=lambda: ["params", "grads", "activations", "activation_grads"]
    )
    kinds: list[Kind] = field(default_factory=lambda: ["max", "mean", "var"])
    dump_gradients: bool | None = None
    dump_gradients_start_step: Annotated[NonNegativeInt, _OF_DUMPS] = 0
    dump_gradients_end_step: Annotated[NonNegativeInt | None, _OF_DUMPS] = None
    dump_gradients_step_interval: Annotated[PositiveInt, _OF_DUMPS] = 1
    dump_gradients_save_first_n: Annotated[PositiveInt | None, _OF_DUMPS] = None

    def explicit_steps(self) -> dict[str, list[int]]:
        return {"dump_gradients_start_step": [self.dump_gradients_start_step]}

    def __post_init__(self) -> None:
        super().__post_init__()
        monitor = self.monitor is not False
        if self.enabled and not monitor and not self.dump_gradients:
            raise UsageError(
                "neither monitors nor dumps gradients",
                where="monitor",
                fix="leave monitor out, or set dump_gradients: true or enabled: false",
            )
        for name, given in (("targets", self.targets), ("kinds", self.kinds)):
            if not given:
                raise UsageError("is empty", where=name, fix="leave it out, or monitor: false")
        if "ratio" in self.kinds and "updates" not in self.targets:
            raise UsageError(
                "the kind ratio is one of updates, which is no target",
                where="kinds",
                fix="add updates to targets",
            )
        self._activations: ActivationProbe | None = None
        self._looks = self._dumps = self._said = False
        self._names: list[tuple[Target | None, str]] = []  # None: not logged
        self._rows: list[TensorRows] = []
        self._before: list[Tensor] = []

    def pre_train(self) -> None:
        model = self.trainer.train_module.model
        if self.monitor is False or not set(ACTIVATIONS) & set(self.targets):
            return
        if isinstance(model, Decoder):
            gradients = "activation_grads" in self.targets
            self._activations = ActivationProbe(model, gradients=gradients)
        else:
            self.trainer.say(
                "note: gap_monitor sees no activations: the model is no Decoder of this package"
            )

    def pre_step(self, batches: Sequence[Any]) -> None:
        step = self.trainer.step + 1
        self._looks = self.monitor is not False and step % self.interval == 0
        self._dumps = self._dumps_at(step)
        self._names, self._rows, self._before = [], [], []
        if self._looks and self._activations is not None:
            self._activations.begin(self.trainer.world.device)

    def post_backward(self) -> None:
        if self._dumps:
            self._dump()
        if self._looks and not self._rows:
            self._before_step()

    def pre_optim_step(self) -> None:
        if (self._looks and not self._rows) or self._dumps:
            if not self._said:
                self.trainer.say(
                    "note: gap_monitor reads gradients after clipping: the train module does not "
                    "call gradients_ready() before"
                )
            self._said = True
            self.post_backward()

    def post_step(self) -> None:
        if not self._looks:
            return
        self._looks = False
        if "updates" in self.targets:
            self._add_updates()
        if "opt_state" in self.targets:
            self._add("opt_state", self._optimizer_state())
        averaged = 0
        if self._activations is not None:
            found = zip(ACTIVATIONS, self._activations.end(), strict=True)
            kept = [(target, rows) for target, rows in found if target in self.targets]
            names = self._activations.names
            self._names += [(target, name) for target, _ in kept for name in names]
            self._rows.append(as_rows([rows for _, rows in kept]))
            averaged = len(kept) * len(names)
        self._record(averaged)

    def pre_log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        # A module that the model computes without showing its output has rows of nothing.
        if self._activations is None or step % self.interval:
            return
        for target in ACTIVATIONS:
            for name in self._activations.names:
                kinds = {kind: statistic_of(target, name, kind) for kind in OF_ACTIVATIONS}
                values = {metrics[each] for each in kinds.values() if each in metrics}
                largest = metrics.get(kinds["max"], 0.0)
                if values and largest == 0 and any(map(math.isnan, values - {largest})):
                    for each in kinds.values():
                        metrics.pop(each, None)

    def close(self) -> None:
        if self._looks and self._activations is not None:
            self._activations.end()
        self._looks = False

    def _parameters(self) -> dict[str, Tensor]:
        named = self.trainer.train_module.model.named_parameters()
        return {name: each for name, each in named if each.numel() > 1}

    def _optimizer_state(self) -> dict[str, Tensor]:
        state = self.trainer.train_module.optimizer.state
        return {
            f"{name}.{key}": value
            for name, parameter in self._parameters().items()
            for key, value in state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        }

    def _before_step(self) -> None:
        parameters = self._parameters()
        if "params" in self.targets or "ratio" in self.kinds:
            self._add("params", parameters)
        if "grads" in self.targets:
            gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            self._add("grads", gradients)
        if "updates" in self.targets:
            parts = [local_part(each) for each in parameters.values()]
            self._before = list(torch._foreach_clone(parts))

    def _add_updates(self) -> None:
        parameters, before = self._parameters(), self._before
        after = [local_part(each) for each in parameters.values()]
        lost = lost_updates(before, after) if "underflow" in self.kinds else None
        changes = torch._foreach_sub(after, before)
        self._keep("updates", parameters, local=changes, underflows=lost)
        self._before = []

    def _add(self, target: Target, tensors: Mapping[str, Tensor]) -> None:
        parts = [local_part(each) for each in tensors.values()]
        under = underflows_of(parts) if "underflow" in self.kinds else None
        self._keep(target, tensors, local=parts, underflows=under)

    def _keep(self, target: Target, tensors: Mapping[str, Tensor], **how: Any) -> None:
        shown = target if target in self.targets else None
        self._names += [(shown, name) for name in tensors]
        self._rows.append(measure([*tensors.values()], self.trainer.world, **how))

    def _record(self, averaged: int) -> None:
        """Exchange the rows and record what is asked for."""
        parts = zip(*self._rows, strict=True)
        rows = TensorRows(*(torch.cat(part) for part in parts))
        statistics = finish(rows, self.trainer.world, averaged=averaged)
        values = {kind: getattr(statistics, kind) for kind in self.kinds if kind != "ratio"}
        columns = {kind: value.unbind() for kind, value in values.items()}
        rms = statistics.rms.unbind()
        first = {name: rms[i] for i, (_, name) in reversed([*enumerate(self._names)])}
        for i, (target, name) in enumerate(self._names):
            if target is None:
                continue
            for kind, column in columns.items():
                if target not in ACTIVATIONS or kind in OF_ACTIVATIONS:
                    self.trainer.record_metric(statistic_of(target, name, kind), column[i])
            if target == "updates" and "ratio" in self.kinds:
                ratio = rms[i] / first[name]  # parameters come first
                self.trainer.record_metric(statistic_of(target, name, "ratio"), ratio)
        self._names, self._rows = [], []

    def _dumps_at(self, step: int) -> bool:
        first, last = self.dump_gradients_start_step, self.dump_gradients_end_step
        return (
            bool(self.dump_gradients)
            and step >= first
            and (last is None or step <= last)
            and (step - first) % self.dump_gradients_step_interval == 0
        )

    def _dump(self) -> None:
        self._dumps = False
        trainer = self.trainer
        named = trainer.train_module.model.named_parameters()
        gradients = {name: like(p.grad, p) for name, p in named if p.grad is not None}
        first_n = self.dump_gradients_save_first_n
        with trainer.pause():
            write_gradients(trainer.work_dir, trainer.step + 1, gradients, trainer.world, first_n)
