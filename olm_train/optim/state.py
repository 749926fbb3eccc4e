"""The state of any torch optimiser, by the names of its parameters.

    optimizer.state --state_of--> "blocks.0.attention.out.weight.exp_avg": tensor or plain value
    the rest        --record----> class of the optimiser, options that training has changed
    names of a checkpoint --make_room--> the same tensors here, to be filled in place

Most optimisers create their state at their first step. `make_room` lets them do it before a load,
by a step with gradients of zero, so that shapes, dtypes and sharding are those the optimiser itself
chooses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from olm_data.decoding import convert
from olm_data.errors import UsageError, ValidationError
from olm_train.distributed.world import World
from olm_train.model.shards import like
from olm_train.optim.groups import ParamGroup

MOST_SHOWN = 5
MOST_STEPS = 3
"""Steps with gradients of zero that `make_room` tries: some optimisers only count at the first."""

_SET_HERE = ("params", "names", "lr", "peak_lr")
"""Entries of a group that the configuration and the schedule set at each start."""


class SpelledFloat(msgspec.Struct, frozen=True):
    """A number that JSON has no word for."""

    float: Literal["nan", "inf", "-inf"]


PlainValue = bool | int | float | str | None
RecordedValue = PlainValue | SpelledFloat


class OptimizerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an optimiser keeps that belongs to no parameter, as JSON values.

    Attributes:
        class_name: of the optimiser; None in checkpoints without.
        groups: of each group of parameters, the options that training has changed.
    """

    class_name: str | None = msgspec.field(name="class", default=None)
    groups: list[dict[str, RecordedValue]] = []


class OptimizerState:
    """Reads the state of an optimiser for a checkpoint, and takes it over from one.

    Args:
        model: its parameters' names are those of the state.
        optimizer: as it was built: options that differ later were changed by training.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._built = [_options(group) for group in optimizer.param_groups]

    def of(self, optimizer: Optimizer) -> OptimizerState:
        """Return this, or the like of an optimiser that has taken the other one's place."""
        return self if optimizer is self.optimizer else OptimizerState(self.model, optimizer)

    def record(self, world: World) -> OptimizerRecord:
        """Return what belongs to no parameter, as JSON values; every rank calls it.

        Raises:
            UsageError: the optimiser keeps something that a checkpoint cannot hold, or values that
                are not the same on all ranks.
        """
        names = names_of(self.model)
        unknown = self.optimizer.state_dict().keys() - {"state", "param_groups"}
        refused = [f"state_dict()[{key!r}]" for key in sorted(unknown)]
        refused += [f"state[{_short(key)}]" for key in self.optimizer.state if key not in names]
        values: dict[str, RecordedValue] = {}
        for name, value in state_of(self.model, self.optimizer).items():
            if not isinstance(value, Tensor):
                _put(values, name, value, refused)
        groups = []
        for group, built in zip(self.optimizer.param_groups, self._built, strict=True):
            changed: dict[str, RecordedValue] = {}
            for key, value in _options(group).items():
                if key not in built or not _same(value, built[key]):
                    _put(changed, key, value, refused)
            groups.append(changed)
        if refused:
            raise UsageError(
                f"the optimiser {class_name(self.optimizer)} keeps state that a checkpoint cannot "
                f"hold: {_listed(refused)}",
                why="a run that goes on from the checkpoint would go on without it",
                fix="keep it as tensors, numbers or text, in lists or mappings, in "
                "optimizer.state[parameter] or in the optimiser's groups",
            )
        self._refuse_differences(world.gather((values, groups)), world.stages)
        return OptimizerRecord(class_name=class_name(self.optimizer), groups=groups)

    def _refuse_differences(
        self, by_rank: Sequence[tuple[dict[str, RecordedValue], Any]], stages: int
    ) -> None:
        """Compare values with those of the first rank of the same stage, and groups with all."""
        options, of_stage = by_rank[0][1], len(by_rank) // stages
        for rank, (values, groups) in enumerate(by_rank):
            other = rank // of_stage * of_stage
            first = by_rank[other][0]
            names = [name for name in first | values if first.get(name) != values.get(name)]
            if names or groups != options:
                raise UsageError(
                    f"the optimiser {class_name(self.optimizer)} keeps values that differ between "
                    f"rank {other if names else 0} and rank {rank}: "
                    f"{_listed(names or ['options of its groups'])}",
                    why="a checkpoint holds one value for all ranks",
                    fix="reduce them over the ranks, or keep them in tensors cut as the weights",
                )

    def take_over(self, record: OptimizerRecord | None, held: Collection[str], where: str) -> None:
        """Take over what `record` returned, with room for the state beside it; every rank calls it.

        Args:
            record: of a checkpoint; None: it has none.
            held: names of the state that is to be filled in, see `make_room`.
            where: the checkpoint.

        Raises:
            ValidationError: the record is of another class, or of other groups.
        """
        ours, record = class_name(self.optimizer), record or OptimizerRecord()
        if (theirs := record.class_name or ours) != ours:
            raise ValidationError(
                f"the checkpoint was trained with the optimiser {theirs}; this configuration has "
                f"{ours}",
                where=where,
                why="the state of one optimiser has another meaning to another one",
                fix="go on with the optimiser of the checkpoint (train_module.optim in its "
                "config.json), or begin a new run with its weights: another trainer.save_folder, "
                "trainer.load_path set to this checkpoint, and trainer.load_optim_state: false "
                "(with trainer.load_trainer_state: false also from the first row again)",
            )
        groups = record.groups
        if any(groups) and len(groups) != len(self.optimizer.param_groups):
            raise ValidationError(
                f"the checkpoint has options of {len(groups)} groups of parameters; there are "
                f"{len(self.optimizer.param_groups)} here",
                where=where,
                why="training has changed them, so they are a part of the state",
                fix="use the configuration it was written with: config.json in it",
            )
        make_room(self.model, self.optimizer, held)
        for group, changed in zip(self.optimizer.param_groups, groups, strict=False):
            group.update({key: _decoded(value) for key, value in changed.items()})


def class_name(optimizer: Optimizer) -> str:
    """Return the name of an optimiser's class, and whether it leaves steps out."""
    name = name_of_class(type(optimizer))
    return name if getattr(optimizer, "guard", None) is None else f"{name} with skipped steps"


def name_of_class(kind: type[Optimizer]) -> str:
    """Return the name of a class of optimisers, without the file it happens to lie in."""
    if getattr(torch.optim, kind.__name__, None) is kind:
        return f"torch.optim.{kind.__name__}"
    if kind.__module__.startswith("olm_train."):
        return f"olm_train.optim.{kind.__qualname__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor | PlainValue]:
    """Return the live state, `parameter.key`; what lies in lists or mappings as `.0` or `.key`."""
    return {
        key: like(value, parameter)
        if isinstance(value, DTensor) and value.shape == parameter.shape
        else value
        for name, parameter in model.named_parameters()
        for key, value in _leaves(optimizer.state.get(parameter, {}), name)
    }


def set_values(model: nn.Module, optimizer: Optimizer, values: Mapping[str, PlainValue]) -> None:
    """Put plain values, by the names of `state_of`, where they belong."""
    parameters = dict(model.named_parameters())
    for name, value in values.items():
        owner = _owner(name, parameters)
        assert owner is not None  # each name has been compared with those here
        holder: Any = optimizer.state[parameters[owner]]
        *path, last = _path(holder, name[len(owner) + 1 :])
        for key in path:
            holder = holder[key]
        holder[last] = value


def make_room(model: nn.Module, optimizer: Optimizer, wanted: Collection[str]) -> None:
    """Let the optimiser create the state that it would create at its first step.

    Every rank calls it. Weights stay as they are, but for rounding; a load replaces them anyway.

    Args:
        wanted: names of tensors and plain values that a checkpoint holds. Parameters without one
            stay without state, as those that have never had a gradient.
    """
    parameters = dict(model.named_parameters())
    owners = {_owner(name, parameters) for name in wanted} - {None}
    for _ in range(MOST_STEPS):
        missing = set(wanted) - state_of(model, optimizer).keys()
        if not any(_owner(name, parameters) for name in missing):
            return
        _step_nowhere(optimizer, [parameters[name] for name in owners if name])


def create_state(optimizer: Optimizer) -> None:
    """Let an optimiser without any state create that of all its parameters; every rank calls it."""
    if not optimizer.state:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        _step_nowhere(optimizer, [p for p in parameters if p.requires_grad])


def _step_nowhere(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    """Take a step with gradients and rates of zero."""
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in everything]
    groups = [dict(group) for group in optimizer.param_groups]
    for parameter in everything:
        parameter.grad = None
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        rate = group["lr"]
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    try:
        optimizer.step()
    finally:
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        for parameter, gradient in zip(everything, gradients, strict=True):
            parameter.grad = gradient


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the names of a model's parameters."""
    return {parameter: name for name, parameter in model.named_parameters()}


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list, tuple)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from _leaves(item, f"{name}.{key}")
        return
    yield name, value


def _owner(name: str, parameters: Collection[str]) -> str | None:
    """Return the parameter that a name of the state belongs to: the longest that it begins with."""
    end = len(name)
    while (end := name.rfind(".", 0, end)) > 0:
        if name[:end] in parameters:
            return name[:end]
    return None


def _path(holder: Any, keys: str) -> list[Any]:
    """Return the keys that lead to `keys`, "Q.0" -> ["Q", 0], through a state as it is."""
    if isinstance(holder, list):
        first, _, rest = keys.partition(".")
        return [int(first), *(_path(holder[int(first)], rest) if rest else [])]
    for key, item in holder.items():
        if str(key) == keys:
            return [key]
        if keys.startswith(f"{key}.") and isinstance(item, (dict, list, tuple)):
            return [key, *_path(item, keys[len(str(key)) + 1 :])]
    raise AssertionError(keys)


def _options(group: ParamGroup) -> ParamGroup:
    """Return a copy of the options of a group that a later one can be compared with."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in _SET_HERE
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and torch.equal(one, other)
    return bool(one == other)


def _put(into: dict[str, RecordedValue], name: str, value: Any, refused: list[str]) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        into[name] = convert({"float": str(value)}, SpelledFloat)
    elif isinstance(value, PlainValue):
        into[name] = value
    else:
        refused.append(f"{name} ({type(value).__name__})")


def _decoded(value: RecordedValue) -> PlainValue:
    return float(value.float) if isinstance(value, SpelledFloat) else value


def _listed(problems: list[str]) -> str:
    rest = len(problems) - MOST_SHOWN
    return "; ".join(problems[:MOST_SHOWN]) + (f"; and {rest:,} more" if rest > 0 else "")


def _short(key: Any) -> str:
    return repr(key)[:40] if not isinstance(key, Tensor) else f"a tensor {list(key.shape)}"
