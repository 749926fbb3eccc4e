"""The state of a run: into a checkpoint, and out of one, another run's or exported weights.

    trainer --record--> train.json
    checkpoint -> same batches, lock, model? -> position in the data -> StartingPoint -> trainer
                                                                        (load: tensors in place)

A starting point is a value: the trainer alone changes its own state. Never: begin anew where a run
was to go on.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Protocol

from olm_data.config.convert import as_dict, differences, parse
from olm_data.config.values import Values
from olm_data.errors import UsageError, ValidationError, printable
from olm_data.storage.store import absolute
from olm_train.checkpoint.exported import is_exported, load_exported
from olm_train.checkpoint.load import Checkpoint, find_checkpoint
from olm_train.checkpoint.manager import CheckpointManager
from olm_train.checkpoint.policy import LoadPolicy
from olm_train.checkpoint.run_state import Origin, RunState
from olm_train.checkpoint.saved_config import relative_path
from olm_train.checkpoint.state import flatten, to_json
from olm_train.checkpoint.weights import model_config, padded
from olm_train.data.loader import DataLoader
from olm_train.model.config import DecoderConfig
from olm_train.optim.state import OptimizerState, create_state, make_room
from olm_train.train_module_base import TrainModule


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """What of a run a checkpoint is put into, and compared with.

    Attributes:
        train_module, optimizer_state, data_loader: of this rank.
        config: resolved configuration, plain values.
        max_steps, stop_step: length of the schedule; step at which the run ends.
        say: prints a line, on rank 0.
    """

    train_module: TrainModule
    optimizer_state: OptimizerState
    data_loader: DataLoader
    config: Mapping[str, Any]
    max_steps: int
    stop_step: int
    say: Callable[[str], None]


class Stateful(Protocol):
    """What has a state of its own in `train.json`: a callback."""

    def state_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """Where a run begins.

    Attributes:
        load: puts weights and optimiser state in place; to be called where something is left to do.
        step: optimiser steps done.
        resumed: whether that is a checkpoint's position; else the run is at its first step.
        callbacks: their states by name.
        origin: path, step and digest of the checkpoint of another run that the run began with.
        changes: fields of the configuration that differ from the checkpoint's, `a.b: old -> new`.
    """

    load: Callable[[], None]
    step: int = 0
    resumed: bool = False
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin | None = None
    changes: tuple[str, ...] = ()


def record(
    parts: RunParts,
    step: int,
    callbacks: Mapping[str, Stateful],
    origin: Origin | None,
) -> RunState:
    """Return what `train.json` holds of a run after `step`; every rank calls it.

    Raises:
        UsageError: there is a value that a checkpoint could not give back.
    """
    # First, as ranks meet in it: a callback may fail on rank 0 alone.
    optimizer = parts.optimizer_state.record(parts.train_module.world)
    states = {name: callback.state_dict() for name, callback in callbacks.items()}
    return RunState(
        optimizer=optimizer,
        step=step,
        max_steps=parts.max_steps,
        **parts.data_loader.batch_sizes.record(),
        world_size=parts.train_module.world.size,
        data_loader=parts.data_loader.state_dict(),
        callbacks=to_json(states, "callbacks"),
        origin=origin,
    )


def find_start(manager: CheckpointManager, policy: LoadPolicy, parts: RunParts) -> StartingPoint:
    """Return where a run begins; every rank calls it. The data loader is put there.

    Where the save folder has no checkpoint, that is with the one of `load_path`, else with initial
    weights: they are drawn by `StartingPoint.load`, and only then.

    Raises:
        ConflictError: there is a checkpoint and the strategy is `never`.
        InputError, ValidationError: there are checkpoints but none verifies (`strict`: the newest
            does not), there is none and the strategy is `always`, `load_path` has none, or it
            belongs to another mixture, model or batch size.
    """
    checkpoint = manager.newest(policy)
    if checkpoint is not None:
        return _resumed(checkpoint, parts)
    if policy.path is None:
        return StartingPoint(load=parts.train_module.ensure_weights)
    return _begun(absolute(policy.path), policy, manager, parts)


def _begun(
    place: str, policy: LoadPolicy, manager: CheckpointManager, parts: RunParts
) -> StartingPoint:
    """Return the start with the checkpoint or the weights at `place`."""
    world = parts.train_module.world
    if world.on_main(lambda: is_exported(place)):
        if policy.trainer_state or policy.optim_state:
            raise UsageError(
                "exported weights come without the state of a trainer or an optimiser",
                where="trainer.load_path",
                fix="set trainer.load_trainer_state and trainer.load_optim_state to false",
            )
        exported = load_exported(place)
        model = parts.train_module.model_config
        weights = exported.weights
        if isinstance(model, DecoderConfig):
            weights = padded(weights, model)
        step, digest = exported.about.step, exported.about.weights.sha256
        start = StartingPoint(load=lambda: parts.train_module.load_state_dict({"model": weights}))
    else:
        checkpoint = find_checkpoint(
            place, world, lambda e: parts.say(f"warning: {e.what} ({e.where})")
        )
        place, step, digest = checkpoint.folder, checkpoint.step, checkpoint.manifest.digest
        if policy.trainer_state:
            start = _resumed(checkpoint, parts, optim_state=policy.optim_state)
        else:
            _model_of(checkpoint, parts)  # of a program that knows more, nothing is taken over
            state = checkpoint.state()
            start = StartingPoint(
                load=lambda: _load_tensors(checkpoint, state, parts, optim_state=policy.optim_state)
            )
    parts.say(f"beginning with {place}, step {step:,}")
    path = relative_path(place, manager.save_folder)
    return replace(start, origin=Origin(path, step, digest))


def _resumed(checkpoint: Checkpoint, parts: RunParts, *, optim_state: bool = True) -> StartingPoint:
    """Return the start at a checkpoint, and say what has changed since."""
    start, was = start_at(checkpoint, parts, optim_state=optim_state), checkpoint.state()
    if start.step >= parts.stop_step:
        return start
    parts.say(f"resuming from {checkpoint.folder} at step {start.step:,}")
    lines = differences(checkpoint.config(), parts.config)
    changes = tuple(printable(line) for line in lines)
    for change in changes:
        parts.say(f"  changed: {change}")
    if was.max_steps != parts.max_steps:
        parts.say(
            f"note: the schedule is {parts.max_steps:,} steps long, it was "
            f"{was.max_steps:,}; the learning rate follows the new length from here"
        )
    return replace(start, changes=changes)


def start_at(checkpoint: Checkpoint, parts: RunParts, *, optim_state: bool = True) -> StartingPoint:
    """Return the start at a checkpoint; every rank calls it. The data loader is put there.

    Raises:
        ValidationError: it belongs to another mixture, model or batch size, or contradicts itself.
    """
    state, loader = checkpoint.state(), parts.data_loader
    _refuse_other_sizes(checkpoint, state, loader)
    loader.load_state_dict(state.data_loader)
    if loader.step != state.step:
        raise ValidationError(
            f"the checkpoint is of step {state.step:,}, the position in its data of step "
            f"{loader.step:,}",
            where=checkpoint.folder,
            why="tokens would be trained on twice, or left out",
            fix="restore the checkpoint from a copy, or remove it to go on from the one before",
        )
    _refuse_other_model(checkpoint, parts)
    return StartingPoint(
        load=lambda: _load_tensors(checkpoint, state, parts, optim_state=optim_state),
        step=state.step,
        resumed=True,
        callbacks=state.callbacks,
        origin=state.origin,
    )


def _load_tensors(
    checkpoint: Checkpoint, state: RunState, parts: RunParts, *, optim_state: bool
) -> None:
    module, optimizer = parts.train_module, parts.optimizer_state
    if optim_state:
        optimizer.check_class(state.optimizer, checkpoint.folder)
        make_room(module.model, module.optimizer, checkpoint.names("optim"))
        held = {f"{part}.{name}" for part in module.state_dict() for name in checkpoint.names(part)}
        if held > flatten(module.state_dict()).keys():  # of a module with names of its own
            create_state(module.optimizer)
    tensors = module.state_dict()
    if not optim_state:
        tensors = {"model": tensors["model"]}
    checkpoint.load_tensors(tensors, module.world)
    module.load_state_dict(tensors)
    if optim_state:
        optimizer.load_record(state.optimizer, checkpoint.folder)


def _refuse_other_sizes(checkpoint: Checkpoint, state: RunState, loader: DataLoader) -> None:
    """Refuse batch sizes that differ in the past; those of steps to come may change."""
    step = state.step
    old, new = state.batch_sizes.until(step), loader.batch_sizes.until(step)
    changed = differences(
        {"data_loader": {"global_batch_size": old.size(0)}},
        {"data_loader": {"global_batch_size": new.size(0)}},
    )
    if not changed and old != new:
        changed = [f"data_loader.batch_size_schedule up to step {step:,}: {old} -> {new}"]
    _refuse(changed, checkpoint)


def _refuse_other_model(checkpoint: Checkpoint, parts: RunParts) -> None:
    old, new = _model_of(checkpoint, parts), parts.config["model"]
    if "attention" in new:
        # Every back-end computes the same function; which one fits depends on the device.
        old = {**old, "attention": new["attention"]}
    _refuse(differences({"model": old}, {"model": new}), checkpoint)


def _model_of(checkpoint: Checkpoint, parts: RunParts) -> Any:
    """Return the shape of a checkpoint's model in plain values, as the run's own has them.

    Fields that the release which saved it did not know have the defaults of the run's class.

    Raises:
        ValidationError: it should be one of our own models, and has fields that ours do not have.
    """
    kind = type(parts.train_module.model_config)
    if kind is DecoderConfig:
        return as_dict(model_config(checkpoint))
    plain = checkpoint.config()
    if is_dataclass(kind):
        values = Values(copy.deepcopy(plain), file=f"{checkpoint.folder}/config.json")
        with contextlib.suppress(UsageError, NameError):  # then the differences say what is wrong
            return as_dict(parse(kind, values, ("model",)))
    return plain["model"]


def _refuse(changed: list[str], checkpoint: Checkpoint) -> None:
    if changed:
        raise ValidationError(
            f"the checkpoint belongs to another configuration: {'; '.join(changed)}",
            where=str(checkpoint.folder),
            why="it could not go on as the same run",
            fix="use the configuration of the checkpoint (its config.json), or start a new run in "
            "another trainer.save_folder",
        )
