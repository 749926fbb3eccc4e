"""A run in a few lines: model, optimiser and data in, losses out.

    model, optimiser, data, hardware -> choose_strategy -> train module, data loader
    train(epochs, max_steps)         -> Trainer.fit     -> losses

A front and no more: the loop is the `Trainer`'s, the step that of `TransformerTrainModule` (for a
`Decoder`) or `BasicTrainModule`.
"""

from __future__ import annotations

import atexit
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from olm_data.bounded_json import JsonObject
from olm_data.config.arguments import checked
from olm_data.config.hints import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from olm_data.errors import UsageError, shown
from olm_data.run_log.log import Step, read_metrics
from olm_data.run_log.metric_names import CE_LOSS
from olm_train.callbacks.base import Callback
from olm_train.callbacks.config import CallbacksConfig
from olm_train.callbacks.console_logger import ConsoleLoggerCallback
from olm_train.checkpoint.policy import CheckpointerConfig
from olm_train.data.base import DataLoaderBase
from olm_train.distributed.world import World, local_device, local_rank
from olm_train.duration import Duration
from olm_train.estimate.device_defaults import Capability
from olm_train.estimate.sharding import Need
from olm_train.extensions.any_model.torch_loader import TorchDataLoader
from olm_train.extensions.any_model.train_module import Loss
from olm_train.extensions.auto.loader import AnyLoader, RowLength, loader_of
from olm_train.extensions.auto.module import ModuleParts, train_module_of
from olm_train.extensions.auto.strategy import (
    Choice,
    DeviceConfig,
    Named,
    Preset,
    TrainerStrategy,
    choose_strategy,
)
from olm_train.optim.given import OptimizerLike
from olm_train.optim.schedule import Constant, CosineWithWarmup
from olm_train.optim.schedule_base import LRSchedule
from olm_train.optim.state import name_of_class
from olm_train.parallel.config import DataParallelConfig
from olm_train.trainer import Trainer


class AutoTrainer:
    """Trains a model on what it finds here, and says what it has chosen and why.

    Alone, or as each of the processes that `torchrun --nproc-per-node=N script.py` starts.

    Args:
        model: a `Decoder`, such as `load_model("hf://ORG/NAME")` gives, or any module; it is
            trained itself. Ranks get the weights of rank 0.
        optimizer: a class of `torch.optim` or like one, or an instance over the model's parameters.
        dataloader: a loader of ours, one of your own, or a plain one of PyTorch, whose batches are
            (input_ids, labels) for a decoder, else what `BasicTrainModule` takes. A plain one
            without a sampler of its own is dealt to the ranks.
        loss: of a module that is no `Decoder`, see `BasicTrainModule`; default: cross entropy of
            the next token.
        device: "auto", "cuda", "cuda:0" or "cpu".
        context_length: tokens of a row, at most; a decoder needs it unless the data are of a lock.
        learning_rate: peak rate of an optimiser given as a class; default: 3e-4.
        weight_decay: of a class, for parameters of two dimensions or more; default: the class's.
        optim: other options of a class, such as {"betas": (0.9, 0.95)}.
        scheduler: of the rate; default: linear warm-up, then a cosine.
        use_warmup_cosine: False: the peak rate throughout.
        warmup_steps: default: a tenth of the run.
        total_steps: length of the schedule, if `train` is to stop sooner.
        min_lr: the rate at the end; default: a tenth of the peak.
        use_amp: compute in bf16 where the device is made for it; weights stay fp32.
        grad_accum_steps: micro-batches of a step, for a plain loader; default: 1.
        grad_clip_norm: gradients are scaled down to this global 2-norm; None: never.
        preset: what is chosen for: "balanced", "memory_efficient" or "speed".
        force_strategy: how to share the weights, whatever fits: "single", "ddp", "fsdp" or "hsdp".
        dp_config: the same with all options.
        device_config: hardware to choose for; default: what is found.
        wrap_classes, min_num_params: of a module that is no `Decoder`: what fsdp and hsdp gather as
            a whole; default: by size.
        callbacks: by name, or a list.
        checkpointer: when checkpoints are saved, and how long they stay.
        save_folder: of the run: a second start with it goes on from its newest checkpoint. Default:
            a new folder in `runs/`.
        world: the processes that train together, if the program started them itself.
        seed: of what training draws, such as dropout and the order of a shuffle.

    Attributes:
        choice: strategy, its options and why.
        train_module, loader, save_folder, world: what it made of the arguments.
        trainer: the `Trainer` of the last call of `train`; None: there was none.

    Raises:
        UsageError: options that contradict each other or what is found.
    """

    @checked("dataloader")
    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerLike,
        dataloader: AnyLoader,
        *,
        loss: Loss | None = None,
        device: str | torch.device = "auto",
        context_length: PositiveInt | None = None,
        learning_rate: NonNegativeFloat | None = None,
        weight_decay: NonNegativeFloat | None = None,
        optim: JsonObject | None = None,
        scheduler: LRSchedule | None = None,
        use_warmup_cosine: bool = True,
        warmup_steps: NonNegativeInt | None = None,
        total_steps: PositiveInt | None = None,
        min_lr: NonNegativeFloat | None = None,
        use_amp: bool = True,
        grad_accum_steps: PositiveInt | None = None,
        grad_clip_norm: PositiveFloat | None = None,
        preset: Preset = "balanced",
        force_strategy: Named | None = None,
        dp_config: DataParallelConfig | None = None,
        device_config: DeviceConfig | None = None,
        wrap_classes: Sequence[type[nn.Module]] = (),
        min_num_params: int | None = None,
        callbacks: Mapping[str, Callback] | Sequence[Callback] = (),
        checkpointer: CheckpointerConfig | None = None,
        save_folder: str | Path | None = None,
        world: World | None = None,
        seed: NonNegativeInt = 0,
    ) -> None:
        options = optimizer_options(optimizer, learning_rate, weight_decay, optim)
        schedule = schedule_of(
            scheduler,
            peak_rate(optimizer, options),
            use_warmup_cosine=use_warmup_cosine,
            warmup_steps=warmup_steps,
            min_lr=min_lr,
        )
        if save_folder is not None and not str(save_folder).strip():
            raise UsageError("save_folder is empty", where="save_folder", fix="leave it out")
        self._total_steps, self._checkpointer = total_steps, checkpointer or CheckpointerConfig()
        self._callbacks, self._losses = callbacks_by_name(callbacks), _Losses()
        self._context_length = context_length
        self._met = world is None
        self.world = _started(device) if world is None else _of(world, device)
        self.loader = loader_of(dataloader, self.world, accumulate=grad_accum_steps, seed=seed)
        devices = _agreed(device_config, self.world)

        def choose(need: Need, given: DataParallelConfig) -> Choice:
            choice = choose_strategy(
                devices,
                need,
                given,
                preset=preset,
                force=None if force_strategy is None else TrainerStrategy(force_strategy),
                fixed=dp_config is not None,
            )
            for line in choice.why:
                self._say(line)
            return choice

        parts = ModuleParts(
            optimizer=optimizer,
            options=options,
            schedule=schedule,
            grad_clip_norm=grad_clip_norm,
            loss=loss,
            wrap_classes=wrap_classes,
            min_num_params=min_num_params,
            preset=preset,
            given=_with_dtype(dp_config, self.world, use_amp=use_amp),
            loader=self.loader,
            context_length=context_length,
            devices=devices,
            world=self.world,
            seed=seed,
        )
        self.train_module, self.choice = train_module_of(model, parts, choose)
        self.save_folder = str(
            self.world.on_main(_new_folder) if save_folder is None else save_folder
        )
        if save_folder is None:
            self._say(
                f"  into {self.save_folder}; to go on with this run later, start again with "
                f"save_folder={self.save_folder!r}"
            )
        self.trainer: Trainer | None = None

    @property
    def strategy(self) -> TrainerStrategy:
        """How the ranks share the weights."""
        return self.choice.strategy

    @property
    def losses(self) -> list[float]:
        """The loss of each step of the run so far, those before a resume too."""
        return [loss for _, loss in sorted(self._losses.by_step.items())]

    @property
    def global_step(self) -> int:
        """Optimiser steps of the run so far."""
        return 0 if self.trainer is None else self.trainer.step

    @property
    def current_epoch(self) -> int:
        """The pass over the data that the last step is of, from 1."""
        return self.loader.epoch

    @checked()
    def train(
        self,
        epochs: PositiveInt | None = None,
        *,
        max_steps: PositiveInt | None = None,
        log_interval: PositiveInt | None = None,
    ) -> list[float]:
        """Train to the end of `epochs` passes or to step `max_steps`, whichever comes first.

        Both count from the beginning of the run: called again, or started again with the same
        `save_folder`, it goes on from the newest checkpoint.

        Args:
            epochs: passes over the data; default: one, unless `max_steps` is given.
            max_steps: optimiser steps.
            log_interval: steps between lines on the terminal; default: that of the console logger.

        Returns:
            The loss of each step of the run, on every rank.

        Raises:
            UsageError: how long the run is is not known, or it cannot go on.
            Others: as `Trainer.fit`.
        """
        if self.trainer is not None and not self._checkpointer.enabled:
            raise UsageError(
                "this run saves no checkpoints, so that it cannot go on where it stopped",
                where="checkpointer",
                fix="train to the end in one call, or let it save them",
            )
        total, stop = steps_of(self.loader, epochs, max_steps, self._total_steps)
        if isinstance(self.loader, TorchDataLoader) and self.loader.steps is None:
            self.loader.epochs = epochs if epochs or max_steps else 1
        self.trainer = Trainer(
            train_module=self.train_module,
            data_loader=self.loader,
            save_folder=self.save_folder,
            max_duration=Duration.steps(total),
            hard_stop=Duration.steps(stop),
            checkpointer=self._checkpointer,
            callbacks=self._with_own(log_interval),
        )
        self.trainer.fit()
        return self.losses

    def close(self) -> None:
        """Leave the other ranks, if it was this that met them; also done when the program ends."""
        if self._met:
            _leave(self.world)

    def __enter__(self) -> AutoTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _with_own(self, log_interval: int | None) -> dict[str, Callback]:
        """Return the callbacks with those of this front."""
        found = dict(self._callbacks)
        if log_interval is not None:
            if any(isinstance(each, ConsoleLoggerCallback) for each in found.values()):
                raise UsageError(
                    "log_interval is given, and a console logger among the callbacks",
                    where="log_interval",
                    fix="leave one of them out",
                )
            found["console_logger"] = ConsoleLoggerCallback(log_interval=log_interval)
        if self._context_length is not None:
            found["row_length"] = RowLength(context_length=self._context_length)
        return {**found, "losses": self._losses}

    def _say(self, line: str) -> None:
        if self.world.main:
            print(shown(line), file=sys.stderr, flush=True)


class _Losses(Callback):
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


def _started(device: str | torch.device) -> World:
    """Meet the other ranks, if there are any; they part when the program ends."""
    if dist.is_initialized():
        raise UsageError(
            "the ranks of this program have met already",
            where="world",
            fix="give AutoTrainer the world they met in: world=World.start(), or that of the first "
            "AutoTrainer",
        )
    world = World.start(device=device_of(device))
    atexit.register(_leave, world)
    return world


def _of(world: World, device: str | torch.device) -> World:
    wanted = device_of(device)
    if wanted not in (None, world.device):
        raise UsageError(
            f"device is {wanted}; the world that is given computes on {world.device}",
            where="device",
            fix="leave one of them out",
        )
    return world


def _leave(world: World) -> None:
    if world.size > 1 and dist.is_initialized():
        world.stop()


def _agreed(given: DeviceConfig | None, world: World) -> DeviceConfig:
    if given is None:
        return DeviceConfig.here(world)
    if (given.world_size, given.device) != (world.size, world.device.type):
        raise UsageError(
            f"device_config is for {given.world_size} ranks on {given.device}; there are "
            f"{world.size} on {world.device.type}",
            where="device_config",
            fix="change what is found here: replace(DeviceConfig.here(world), memory=...)",
        )
    return given


def _with_dtype(
    asked: DataParallelConfig | None, world: World, *, use_amp: bool
) -> DataParallelConfig:
    """Return options of sharing, with the dtype to compute in."""
    given = asked or DataParallelConfig()
    if given.param_dtype == "bfloat16" and not use_amp:
        raise UsageError(
            "use_amp is off; dp_config.param_dtype is bfloat16",
            where="use_amp",
            fix="leave one of them out",
        )
    if given.param_dtype != "auto":
        return given
    fast = use_amp and Capability.of(world.device).modern
    return replace(given, param_dtype="bfloat16" if fast else "float32")


def _new_folder() -> str:
    """Make a folder for a run, named by the time."""
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return str(folder)
    raise UsageError("no name is left for a folder in runs/", fix="give save_folder")


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
    given: LRSchedule | None,
    peak: float,
    *,
    use_warmup_cosine: bool = True,
    warmup_steps: int | None = None,
    min_lr: float | None = None,
) -> LRSchedule:
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
    kinds = reversed(CallbacksConfig.kinds().items())  # of two names of a class the first
    known = {kind: name for name, kind in kinds if issubclass(kind, Callback)}
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


def snake_case(name: str) -> str:
    """`StepLogger` -> `step_logger`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
