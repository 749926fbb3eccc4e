"""What the options of an `AutoTrainer` come to: optimiser's options, schedule, device, length.

Each contradiction is refused with what to leave out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.optim import Optimizer

from olm_data.bounded_json import JsonObject
from olm_data.errors import UsageError
from olm_train.callbacks.base import Callback
from olm_train.callbacks.config import CallbacksConfig
from olm_train.data.base import DataLoaderBase
from olm_train.distributed.world import local_device, local_rank
from olm_train.optim.given import OptimizerLike
from olm_train.optim.schedule import Constant, CosineWithWarmup
from olm_train.optim.schedule_base import Schedule
from olm_train.optim.state import name_of_class

LEARNING_RATE = 3e-4
"""Of an optimiser given as a class."""
WARMUP = 0.1
"""Share of a run that the rate rises in, if nothing is said."""


def optimizer_options(
    optimizer: OptimizerLike,
    learning_rate: float | None,
    weight_decay: float | None,
    others: JsonObject | None,
) -> JsonObject:
    """Return the options of an optimiser given as a class; none of an instance.

    Raises:
        UsageError: options of an instance, or one that is given twice.
    """
    named = {"lr": learning_rate, "weight_decay": weight_decay}
    options = {name: value for name, value in named.items() if value is not None}
    twice = sorted(options.keys() & (others or {}).keys())
    if twice:
        raise UsageError(
            f"{' and '.join(twice)} in optim is given as an argument, too", where="optim"
        )
    options |= others or {}
    if not isinstance(optimizer, Optimizer):
        return {"lr": LEARNING_RATE, **options}
    if options:
        raise UsageError(
            "learning_rate, weight_decay and optim are for an optimiser given as a class",
            fix=f"leave them out, or give {name_of_class(type(optimizer))} itself",
        )
    return {}


def peak_rate(optimizer: OptimizerLike, options: JsonObject) -> float:
    """Return the largest rate of an optimiser's groups."""
    if isinstance(optimizer, Optimizer):
        return max(float(group["lr"]) for group in optimizer.param_groups)
    return float(options["lr"])


def schedule_of(
    given: Schedule | None,
    peak: float,
    *,
    use_warmup_cosine: bool = True,
    warmup_steps: int | None = None,
    min_lr: float | None = None,
) -> Schedule:
    """Return the schedule of the rate: the given one, warm-up and cosine, or none.

    Raises:
        UsageError: an option that would have no effect, or a lowest rate above the peak.
    """
    parts = {"warmup_steps": warmup_steps, "min_lr": min_lr}
    useless = [name for name, value in parts.items() if value is not None]
    if useless and (given is not None or not use_warmup_cosine):
        other = "use_warmup_cosine=False" if given is None else "scheduler"
        raise UsageError(
            f"{useless[0]} has no effect with {other}",
            where=useless[0],
            fix=f"leave it out, or leave {other} out",
        )
    if given is not None:
        return given
    if not use_warmup_cosine:
        return Constant()
    if min_lr is not None and min_lr > peak:
        raise UsageError(f"min_lr {min_lr:g} is above the peak rate {peak:g}", where="min_lr")
    schedule = CosineWithWarmup(
        warmup=warmup_steps, warmup_fraction=WARMUP if warmup_steps is None else None
    )
    if min_lr is None:
        return schedule
    return replace(schedule, alpha_f=min_lr / peak if peak else 1.0)


def device_of(device: str | torch.device) -> torch.device | None:
    """Return the device that is asked for; None: what fits this machine.

    Raises:
        UsageError: there is no such device, or training does not run on it.
    """
    if str(device) == "auto":
        return None
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise UsageError(
            f"unknown device {device!r}", where="device", fix='"auto", "cuda", "cuda:0" or "cpu"'
        ) from error
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.type != "cuda" or not torch.cuda.is_available():
        raise UsageError(
            f"there is no device {device!s} to train on here",
            where="device",
            why="training runs on CUDA devices (NVIDIA, and AMD with ROCm) and on CPUs",
            fix='use "auto" or "cpu"',
        )
    return local_device(local_rank() if wanted.index is None else wanted.index)


def steps_of(
    loader: DataLoaderBase, epochs: int | None, max_steps: int | None, total_steps: int | None
) -> tuple[int, int]:
    """Return the steps of the schedule, and the step at which training stops.

    That is after `epochs` passes or `max_steps`, whichever comes first; one pass if neither is
    given. Where nobody knows how long a pass is, it ends when the data do.

    Raises:
        UsageError: a length that is not known; a schedule shorter than the training.
    """
    passes = epochs if epochs is not None or max_steps is not None else 1
    ends = [] if max_steps is None else [max_steps]
    if passes is not None and loader.steps is not None:
        ends.append(passes * loader.steps)
    if not ends and total_steps is None:
        raise UsageError(
            f"how many steps {passes} epoch{'s' if passes != 1 else ''} of this data are is not "
            "known",
            where="max_steps",
            why="the learning-rate schedule runs over the steps of the run",
            fix="give max_steps, or total_steps to the AutoTrainer; the run ends sooner where the "
            "data do",
        )
    stop = min(ends) if ends else total_steps
    assert stop is not None
    if total_steps is not None and total_steps < stop:
        raise UsageError(
            f"total_steps {total_steps:,} is less than the {stop:,} steps to train",
            where="total_steps",
            why="it is the length of the learning-rate schedule",
            fix="give more, or train less",
        )
    return total_steps or stop, stop


def callbacks_by_name(
    given: Mapping[str, Callback] | Sequence[Callback],
) -> dict[str, Callback]:
    """Return callbacks by name; of a list, by that of train.yaml, else by that of the class.

    Raises:
        UsageError: two of a list have one name.
    """
    if isinstance(given, Mapping):
        return dict(given)
    known = _names_in_yaml()
    found: dict[str, Callback] = {}
    for each in given:
        name = known.get(type(each)) or snake_case(type(each).__name__.removesuffix("Callback"))
        if name in found:
            raise UsageError(
                f"two callbacks are called {name!r}",
                where="callbacks",
                fix="give a mapping with a name for each",
            )
        found[name] = each
    return found


def _names_in_yaml() -> dict[type, str]:
    """Return the names of callbacks in train.yaml, by class; of two the first."""
    kinds = reversed(CallbacksConfig.kinds().items())
    return {kind: name for name, kind in kinds if issubclass(kind, Callback)}


def snake_case(name: str) -> str:
    """`StepLogger` -> `step_logger`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
