"""Where a run begins: the newest good checkpoint of its own, else another run's, else step 0.

    clean partial folders -> newest that verifies -> same lock, model, batches?  -> loader, tensors,
                          -> none: load_path      -> all of its state, or weights   callbacks, step

Never: go on after a damaged checkpoint without a word, or begin anew where a run was to go on.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from olm_data.config.convert import as_dict, differences, parse
from olm_data.config.values import Values
from olm_data.errors import (
    ConflictError,
    InputError,
    OlmError,
    UsageError,
    ValidationError,
    printable,
)
from olm_data.order.steps import StepSizes
from olm_data.storage.store import Store, absolute
from olm_train.checkpoint.exported import is_exported, load_exported
from olm_train.checkpoint.load import Checkpoint, find_checkpoint, newest_checkpoint
from olm_train.checkpoint.manifest import Kind, Manifest
from olm_train.checkpoint.place import candidates, remove_partial
from olm_train.checkpoint.saved_config import relative_path
from olm_train.checkpoint.state import flatten
from olm_train.checkpoint.weights import model_config, padded
from olm_train.model.config import DecoderConfig
from olm_train.optim.state import create_state, make_room

if TYPE_CHECKING:
    from olm_train.trainer import Trainer


class LoadStrategy(StrEnum):
    """What a run does with checkpoints in its save folder."""

    if_available = "if_available"
    """Go on from the newest one that verifies; start anew when there is none."""
    always = "always"
    """Go on from the newest one that verifies; an error when there is none."""
    never = "never"
    """Start anew; an error when there is one, since its run would be lost."""


@dataclass(frozen=True, kw_only=True)
class LoadPolicy:
    """Where a run begins.

    Attributes:
        strategy: what to do with checkpoints in the save folder.
        strict: a newer checkpoint that does not verify is an error, not a warning.
        path: checkpoint, run or exported weights to begin with where the save folder has none.
        trainer_state: take step, data position and callbacks' state from `path` too.
        optim_state: take the optimiser's state from `path` too.

    Raises:
        UsageError: a choice would have no effect.
    """

    strategy: LoadStrategy = LoadStrategy.if_available
    strict: bool = False
    path: str | None = None
    trainer_state: bool = True
    optim_state: bool = True

    def __post_init__(self) -> None:
        never = self.strategy is LoadStrategy.never
        for name, given in (("load_path", self.path is not None), ("load_strict", self.strict)):
            if given and never:
                raise UsageError(
                    f"{name} has no effect with load_strategy `never`",
                    where=f"trainer.{name}",
                    why="a run that starts anew reads no checkpoint",
                    fix="leave one of them out",
                )
        if self.path is None and not (self.trainer_state and self.optim_state):
            raise UsageError(
                "load_trainer_state and load_optim_state have no effect without load_path",
                where="trainer.load_path",
                why="a run that goes on in its own save folder takes over all of its state",
                fix="leave them out, or say what to begin with",
            )


def restore(trainer: Trainer, policy: LoadPolicy | None = None) -> None:
    """Put a trainer where its newest good checkpoint left off; every rank calls it.

    Where the save folder has no checkpoint, begin
    with that of `load_path`, else with initial weights: they are drawn here, and only then.

    Args:
        trainer: the trainer.
        policy: instead of the trainer's own.

    Raises:
        ConflictError: there is a checkpoint and the strategy is `never`.
        InputError, ValidationError: there are checkpoints but none verifies (`strict`: the newest
            does not), there is none and the strategy is `always`, `load_path` has none, or it
            belongs to another mixture, model or batch size.
    """
    folder, world = trainer.save_folder, trainer.world
    policy = policy or trainer.load_policy
    world.on_main(lambda: remove_partial(folder, trainer.fence))
    found = world.on_main(lambda: candidates(folder))
    if found and policy.strategy is LoadStrategy.never:
        raise ConflictError(
            f"there is a run here already, with the checkpoint {found[0]}",
            where=folder,
            why="load_strategy is `never`: a new run would write over it",
            fix="choose another trainer.save_folder, or remove the old run",
        )
    damaged: list[OlmError] = []
    checkpoint = newest_checkpoint(folder, world, damaged.append)
    for error in damaged:
        _warn(trainer, error)
    if checkpoint is not None:
        if damaged and policy.strict:
            raise ValidationError(
                "the newest checkpoint does not verify",
                where=folder,
                why="; ".join(error.what for error in damaged),
                fix=f"restore it, or go on from step {checkpoint.step:,} without --strict",
            )
        if damaged:
            trainer.say(f"warning: falling back to the checkpoint of step {checkpoint.step:,}")
        _resume(trainer, checkpoint, optim_state=True)
        trainer.checkpoints = world.on_main(lambda: _known(folder, checkpoint))
    elif damaged or (policy.strategy is LoadStrategy.always and policy.path is None):
        raise ValidationError(
            "there is no usable checkpoint",
            where=folder,
            why="; ".join(error.what for error in damaged)
            or "load_strategy is `always` and there is none at all",
            fix="restore one, or start a new run in another trainer.save_folder",
        )
    elif policy.path is not None:
        _begin(trainer, policy, absolute(policy.path))
    else:
        trainer.train_module.ensure_weights()


def _warn(trainer: Trainer, error: OlmError) -> None:
    trainer.say(f"warning: {error.what} ({error.where})")


def _begin(trainer: Trainer, policy: LoadPolicy, path: str) -> None:
    """Begin a run with the checkpoint or the weights at `path`."""
    world = trainer.world
    if world.on_main(lambda: is_exported(path)):
        if policy.trainer_state or policy.optim_state:
            raise UsageError(
                "exported weights come without the state of a trainer or an optimiser",
                where="trainer.load_path",
                fix="set trainer.load_trainer_state and trainer.load_optim_state to false",
            )
        exported = load_exported(path)
        model = trainer.train_module.model_config
        weights = exported.weights
        if isinstance(model, DecoderConfig):
            weights = padded(weights, model)
        trainer.train_module.load_state_dict({"model": weights})
        _begun(trainer, path, exported.about.step, exported.about.weights.sha256)
        return
    checkpoint = find_checkpoint(
        path, world, lambda e: trainer.say(f"warning: {e.what} ({e.where})")
    )
    if policy.trainer_state:
        _resume(trainer, checkpoint, optim_state=policy.optim_state)
    else:
        _model_of(checkpoint, trainer)  # of a program that knows more, nothing is taken over
        _load_tensors(trainer, checkpoint, checkpoint.state(), optim_state=policy.optim_state)
    _begun(trainer, checkpoint.folder, checkpoint.step, checkpoint.manifest.digest)


def _begun(trainer: Trainer, place: str, step: int, digest: str) -> None:
    trainer.origin = {
        "path": relative_path(place, trainer.save_folder),
        "step": step,
        "digest": digest,
    }
    trainer.say(f"beginning with {place}, step {step:,}")


def _load_tensors(
    trainer: Trainer, checkpoint: Checkpoint, state: Mapping[str, Any], *, optim_state: bool
) -> None:
    module, optimizer = trainer.train_module, trainer.optimizer_state
    record = state.get("optimizer")
    if optim_state:
        optimizer.check_class(record, checkpoint.folder)
        make_room(module.model, module.optimizer, checkpoint.names("optim"))
        held = {f"{part}.{name}" for part in module.state_dict() for name in checkpoint.names(part)}
        if held > flatten(module.state_dict()).keys():  # of a module with names of its own
            create_state(module.optimizer)
    tensors = module.state_dict()
    if not optim_state:
        tensors = {"model": tensors["model"]}
    checkpoint.load_tensors(tensors, trainer.world)
    module.load_state_dict(tensors)
    if optim_state:
        optimizer.load_record(record, checkpoint.folder)


def _resume(trainer: Trainer, checkpoint: Checkpoint, *, optim_state: bool) -> None:
    state = load_state(trainer, checkpoint, optim_state=optim_state)
    if state["step"] < trainer.stop_step:
        trainer.say(f"resuming from {checkpoint.folder} at step {state['step']:,}")
        changes = differences(checkpoint.config(), trainer.config)
        trainer.config_changes = tuple(printable(line) for line in changes)
        for change in trainer.config_changes:
            trainer.say(f"  changed: {change}")
        if state["max_steps"] != trainer.max_steps:
            trainer.say(
                f"note: the schedule is {trainer.max_steps:,} steps long, it was "
                f"{state['max_steps']:,}; the learning rate follows the new length from here"
            )


def load_state(
    trainer: Trainer, checkpoint: Checkpoint, *, optim_state: bool = True
) -> dict[str, Any]:
    """Put a trainer at a checkpoint of its run, and return that one's `train.json`.

    Every rank calls it. Where nothing is left to train or to do, no tensor is read.

    Raises:
        ValidationError: it belongs to another mixture, model or batch size, or contradicts itself.
    """
    state = checkpoint.state()
    _refuse_other_sizes(trainer, checkpoint, state)
    trainer.data_loader.load_state_dict(state["data_loader"])
    if trainer.data_loader.step != state["step"]:
        raise ValidationError(
            f"the checkpoint is of step {state['step']:,}, the position in its data of step "
            f"{trainer.data_loader.step:,}",
            where=checkpoint.folder,
            why="tokens would be trained on twice, or left out",
            fix="restore the checkpoint from a copy, or remove it to go on from the one before",
        )
    _refuse_changes(trainer, checkpoint)
    for name, callback_state in state["callbacks"].items():
        if name in trainer.callbacks:
            trainer.callbacks[name].load_state_dict(callback_state)
        elif callback_state:
            trainer.say(f"note: no callback {printable(name)} here takes the state it has there")
    trainer.step, trainer.resumed = state["step"], True
    trainer.origin = state.get("origin")
    if trainer.step >= trainer.stop_step:
        callbacks = trainer.callbacks.values()
        trainer.left = [text for callback in callbacks for text in callback.left_to_do()]
    if trainer.step < trainer.stop_step or trainer.left:
        _load_tensors(trainer, checkpoint, state, optim_state=optim_state)
    return state


def _refuse_other_sizes(trainer: Trainer, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
    """Refuse batch sizes that differ in the past; those of steps to come may change."""
    step = state["step"]
    sizes = StepSizes.recorded(state["global_batch_size"], state.get("batch_size_changes", ()))
    old, new = sizes.until(step), trainer.data_loader.batch_sizes.until(step)
    changed = differences(
        {"data_loader": {"global_batch_size": old.size(0)}},
        {"data_loader": {"global_batch_size": new.size(0)}},
    )
    if not changed and old != new:
        changed = [f"data_loader.batch_size_schedule up to step {step:,}: {old} -> {new}"]
    _refuse(changed, checkpoint)


def _refuse_changes(trainer: Trainer, checkpoint: Checkpoint) -> None:
    old, new = _model_of(checkpoint, trainer), trainer.config["model"]
    if "attention" in new:
        # Every back-end computes the same function; which one fits depends on the device.
        old = {**old, "attention": new["attention"]}
    _refuse(differences({"model": old}, {"model": new}), checkpoint)


def _model_of(checkpoint: Checkpoint, trainer: Trainer) -> Any:
    """Return the shape of a checkpoint's model in plain values, as the trainer's own has them.

    Fields that the release which saved it did not know have the defaults of the trainer's class.

    Raises:
        ValidationError: it should be one of our own models, and has fields that ours do not have.
    """
    kind = type(trainer.train_module.model_config)
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


def _known(save_folder: str, checkpoint: Checkpoint) -> dict[int, Kind]:
    """Return the checkpoints up to the one that was loaded; a damaged newer one does not count."""
    known = {}
    for name in candidates(save_folder):
        # Older than the good one, and never used:
        with contextlib.suppress(ValidationError, InputError):
            manifest = Manifest.read(Store(save_folder).child(name))
            if manifest.step <= checkpoint.step:
                known[manifest.step] = manifest.kind
    return known
