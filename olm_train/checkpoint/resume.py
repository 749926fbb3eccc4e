"""The state of a run: into a checkpoint, and out of one, another run's or exported weights.

    trainer --record--> train.json
    checkpoint -> same batches, lock, model? -> position in the data -> StartingPoint -> trainer
                                                                        (load: tensors in place)

A starting point is a value: the trainer alone changes its own state.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from olm_data.bounded_json import JsonObject
from olm_data.config.convert import as_dict, parse
from olm_data.config.values import Values, differences
from olm_data.errors import UsageError, ValidationError, printable
from olm_data.storage.store import absolute
from olm_train.checkpoint.documents import RunOrigin, RunState, relative_path
from olm_train.checkpoint.load import Checkpoint, find_checkpoint, held_elsewhere
from olm_train.checkpoint.manifest import (
    CONFIG,
    DOCUMENT,
    LOCK,
    MANIFEST,
    MERGE,
    POINTER,
    STATE,
    TOKENIZER,
)
from olm_train.checkpoint.model_format import format_of
from olm_train.checkpoint.policy import LoadPolicy
from olm_train.checkpoint.portable import model_config
from olm_train.checkpoint.state import FlatState, flatten, to_json
from olm_train.checkpoint.tensors import read_rows
from olm_train.data.base import DataLoaderBase
from olm_train.data.lock_words import drawn_before
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import build_decoder
from olm_train.model.load import model_of, own_parts, padded
from olm_train.model.shards import local_blocks
from olm_train.model.upcycle import OPTION, Slices, dense_name, put_copies, refuse_unequal
from olm_train.model.weights_folder import ExportedWeights, is_exported, kept, load_exported
from olm_train.optim.state import OptimizerState, create_state
from olm_train.train_module_base import TrainModule


class Stateful(Protocol):
    """What has a state of its own in `train.json`, tensors and files of its own: a callback."""

    def state_dict(self) -> JsonObject: ...
    def tensors(self) -> Mapping[str, Tensor]: ...
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> bool: ...
    def documents(self) -> Mapping[str, bytes]: ...


class ResumableRun(Protocol):
    """What a checkpoint holds of a run, is put into and compared with: the trainer.

    Attributes:
        train_module, optimizer_state, data_loader: of this rank.
        save_folder, work_dir: the run's folder, local or remote; the local one of its logs.
        config: resolved configuration, plain values.
        step, max_steps, stop_step: optimiser steps done; length of the schedule; where it ends.
        origin: checkpoint of another run that this one began with.
        callbacks: by name.
        say: prints a line, on rank 0.
    """

    train_module: TrainModule
    optimizer_state: OptimizerState
    data_loader: DataLoaderBase
    save_folder: str
    work_dir: Path
    config: JsonObject
    step: int = 0
    max_steps: int
    stop_step: int
    origin: RunOrigin | None = None
    callbacks: Mapping[str, Stateful]

    def say(self, message: str) -> None: ...


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
        folder: of the checkpoint or exported weights that `load` reads; None: there are none.
    """

    load: Callable[[], None]
    step: int = 0
    resumed: bool = False
    callbacks: Mapping[str, JsonObject] = field(default_factory=dict)
    origin: RunOrigin | None = None
    changes: tuple[str, ...] = ()
    folder: str | None = None


def record(run: ResumableRun, *, callbacks: bool = True) -> RunState:
    """Return what `train.json` holds of a run, with the states of its callbacks or without.

    Every rank calls it.

    Raises:
        UsageError: there is a value that a checkpoint could not give back.
    """
    # First, as ranks meet in it: a callback may fail on rank 0 alone.
    optimizer = run.optimizer_state.record(run.train_module.world)
    sizes = run.data_loader.batch_sizes
    position, by_rank = _positions(run)
    kept = run.callbacks if callbacks else {}
    states = {name: mapping_of(name, "state_dict", c.state_dict()) for name, c in kept.items()}
    return RunState(
        optimizer=optimizer,
        step=run.step,
        max_steps=run.max_steps,
        global_batch_size=sizes.size(0),
        batch_size_changes=sizes.changes or msgspec.UNSET,
        world_size=run.train_module.world.size,
        data_loader=position,
        data_loaders=by_rank,
        callbacks=to_json(states, "callbacks"),
        origin=run.origin,
    )


CALLBACKS = "callbacks"
"""Part of the tensors of a checkpoint, beside "model" and "optim"."""


def tensors_of_callbacks(run: ResumableRun) -> FlatState:
    """Return the tensors that callbacks keep, by names that begin with `callbacks.NAME.`."""
    return {
        f"{CALLBACKS}.{name}.{key}": tensor
        for name, callback in run.callbacks.items()
        for key, tensor in mapping_of(name, "tensors", callback.tensors(), Tensor).items()
    }


_OWN_NAMES = {MANIFEST, POINTER, STATE, CONFIG, LOCK, TOKENIZER, MERGE}


def documents_of_callbacks(run: ResumableRun) -> dict[str, bytes]:
    """Return the files that callbacks want in a checkpoint, by name.

    Raises:
        UsageError: a name is that of another file there, or none that a checkpoint can hold.
    """
    found: dict[str, bytes] = {}
    for name, callback in run.callbacks.items():
        for file, data in mapping_of(name, "documents", callback.documents(), bytes).items():
            if file in _OWN_NAMES | found.keys() or not DOCUMENT.fullmatch(file):
                raise UsageError(
                    f"the callback {name!r} cannot give each checkpoint a file {printable(file)!r}",
                    why="a name is that of no other file there, and has letters, digits and _.- "
                    "alone",
                    fix="give it another name",
                )
            found[file] = data
    return found


def _hand_out(checkpoint: Checkpoint, taken: Iterable[str], run: ResumableRun) -> None:
    """Offer callbacks the tensors that they had not asked for; say what nobody takes.

    Args:
        taken: names of what they have asked for.
    """
    left = {f"{CALLBACKS}.{name}" for name in checkpoint.names(CALLBACKS)} - {*taken}
    left -= held_elsewhere(taken, run.train_module.world)
    for name in sorted({key.split(".")[1] for key in left}):
        prefix, callback = f"{CALLBACKS}.{name}.", run.callbacks.get(name)
        keys = sorted(key.removeprefix(prefix) for key in left if key.startswith(prefix))
        if callback is not None and callback.load_tensors(
            checkpoint.whole_tensors(prefix, keys, run.train_module.world)
        ):
            continue
        run.say(
            f"note: {len(keys):,} tensors that the callback {printable(name)} kept in the "
            "checkpoint are not used: "
            + (
                "no callback here takes them"
                if callback is None
                else "it has none of these names yet, and no load_tensors that takes them: "
                + printable(", ".join(keys[:3]))
            )
        )


def _positions(run: ResumableRun) -> tuple[JsonObject, tuple[JsonObject, ...] | msgspec.UnsetType]:
    """Return the state of rank 0's data loader, and that of each rank where they differ."""
    loader = run.data_loader
    if loader.lock is not None:  # the same on each, and for any number of ranks
        return loader.state_dict(), msgspec.UNSET
    state = to_json(loader.state_dict(), "data_loader")
    first, *others = states = run.train_module.world.gather(state)
    return first, tuple(states) if any(other != first for other in others) else msgspec.UNSET


def _position_here(checkpoint: Checkpoint, state: RunState, run: ResumableRun) -> JsonObject:
    """Return the state of this rank's data loader.

    Raises:
        ValidationError: the data of the checkpoint, or of this run, come from a lock and the
            other's do not; or each rank had a state of its own, and there were more or fewer.
    """
    world, locked = run.train_module.world, run.data_loader.lock is not None
    if locked != bool(checkpoint.manifest.lock_digest):
        theirs, ours = ("no mixture lock", "one") if locked else ("a mixture lock", "none")
        raise ValidationError(
            f"the data of the checkpoint came from {theirs}, those of this run come from {ours}",
            where=checkpoint.folder,
            why="its position in the data means nothing here",
            fix="go on with the data loader of the run, or begin a new run with its weights: "
            "another trainer.save_folder, trainer.load_path set to this checkpoint, and "
            "trainer.load_trainer_state: false",
        )
    if state.data_loaders is msgspec.UNSET:
        return state.data_loader
    if len(state.data_loaders) != world.size:
        raise ValidationError(
            f"the data loaders of {len(state.data_loaders)} ranks had each a state of its own; "
            f"there are {world.size} ranks here",
            where=checkpoint.folder,
            why="which rank would go on with which data is not known",
            fix=f"go on with {len(state.data_loaders)} ranks",
        )
    return state.data_loaders[world.rank]


def begin(policy: LoadPolicy, run: ResumableRun) -> StartingPoint:
    """Return the start of a run whose save folder has no checkpoint; every rank calls it.

    That is with what lies at `load_path`, else with initial weights: they are drawn by
    `StartingPoint.load`, and only then. The data loader is put there.

    Raises:
        InputError: there is no checkpoint at `load_path`.
        ValidationError: it belongs to another mixture, model or batch size.
        UsageError: exported weights lack the state that is asked for.
    """
    if policy.path is None:
        return StartingPoint(load=run.train_module.ensure_weights)
    if policy.upcycle:
        policy.require_weights_alone("a mixture begins as a dense model")
    place, world = absolute(policy.path), run.train_module.world
    if (foreign := world.on_main(lambda: format_of(place))) is not None:
        found = foreign.begin(
            policy, run.train_module, run.data_loader.lock, run.save_folder, run.say
        )
        run.say(f"beginning with {found.place}")
        return StartingPoint(load=found.load, origin=found.origin, folder=found.place)
    if world.on_main(lambda: is_exported(place)):
        policy.require_weights_alone("exported weights come")
        exported = load_exported(place)
        step, digest = exported.about.step or 0, exported.about.weights.sha256
        if policy.upcycle:
            start = StartingPoint(load=upcycled(exported, run.train_module))
        else:
            model, weights = run.train_module.model_config, exported.weights
            weights = padded(weights, model) if isinstance(model, DecoderConfig) else weights
            start = StartingPoint(load=lambda: run.train_module.load_state_dict({"model": weights}))
    else:
        checkpoint = find_checkpoint(
            place, world, lambda e: run.say(f"warning: {e.what} ({e.where})")
        )
        place, step, digest = checkpoint.folder, checkpoint.step, checkpoint.manifest.digest
        if policy.trainer_state:
            start = resume(checkpoint, run, optim_state=policy.optim_state)
        elif policy.upcycle:
            start = StartingPoint(load=upcycled(checkpoint, run.train_module))
        else:
            _config_of(checkpoint, run)  # of a program that knows more, nothing is taken over
            if known := drawn_before(checkpoint.state.data_loader, run.data_loader.lock):
                run.say(f"note: {known}")
            start = StartingPoint(
                load=lambda: _load(checkpoint, run, optim_state=policy.optim_state, callbacks=False)
            )
    run.say(f"beginning with {place}, step {step:,}")
    path = relative_path(place, run.save_folder)
    return replace(start, origin=RunOrigin(path, step, digest), folder=place)


def resume(checkpoint: Checkpoint, run: ResumableRun, *, optim_state: bool = True) -> StartingPoint:
    """Return the start at a checkpoint as `start_at` does, and say what has changed since."""
    start, was = start_at(checkpoint, run, optim_state=optim_state), checkpoint.state
    done = start.step >= run.stop_step
    if not done:
        run.say(f"resuming from {checkpoint.folder} at step {start.step:,}")
    for change in start.changes:
        run.say(f"  changed{', and no step is left that it acts on' if done else ''}: {change}")
    if not done and was.max_steps != run.max_steps:
        run.say(
            f"note: the schedule is {run.max_steps:,} steps long, it was "
            f"{was.max_steps:,}; the learning rate follows the new length from here"
        )
    return start


def start_at(
    checkpoint: Checkpoint, run: ResumableRun, *, optim_state: bool = True
) -> StartingPoint:
    """Return the start at a checkpoint; every rank calls it. The data loader is put there.

    Raises:
        ValidationError: it belongs to another mixture, model or batch size, or contradicts itself.
    """
    state, loader = checkpoint.state, run.data_loader
    _refuse_other_sizes(checkpoint, state, loader)
    loader.load_state_dict(_position_here(checkpoint, state, run))
    if loader.step != state.step:
        raise ValidationError(
            f"the checkpoint is of step {state.step:,}, the position in its data of step "
            f"{loader.step:,}",
            where=checkpoint.folder,
            why="tokens would be trained on twice, or left out",
            fix="restore the checkpoint from a copy, or remove it to go on from the one before",
        )
    saved = _config_of(checkpoint, run)
    changes = differences(saved, run.config)
    shape = differences({"model": saved["model"]}, {"model": run.config["model"]})
    # Every back-end computes the same function; which one fits depends on the device.
    _refuse([c for c in shape if not c.startswith("model.attention.backend: ")], checkpoint)
    return StartingPoint(
        load=lambda: _load(checkpoint, run, optim_state=optim_state, callbacks=True),
        step=state.step,
        resumed=True,
        callbacks=state.callbacks,
        origin=state.origin,
        changes=tuple(map(printable, changes)),
        folder=checkpoint.folder,
    )


def _load(checkpoint: Checkpoint, run: ResumableRun, *, optim_state: bool, callbacks: bool) -> None:
    """Put the tensors of a checkpoint in place; callbacks have taken over their states."""
    module, optimizer = run.train_module, run.optimizer_state
    if optim_state:
        optimizer.take_over(
            checkpoint.state.optimizer, checkpoint.names("optim"), checkpoint.folder
        )
        held = {f"{part}.{name}" for part in module.state_dict() for name in checkpoint.names(part)}
        if held > flatten(module.state_dict()).keys():  # of a module with names of its own
            create_state(module.optimizer)
    tensors = module.state_dict()
    if not optim_state:
        tensors = {"model": tensors["model"]}
    wanted = tensors_of_callbacks(run) if callbacks else {}
    checkpoint.load_tensors({**tensors, **wanted}, module.world)
    module.load_state_dict(tensors)
    if callbacks:
        _hand_out(checkpoint, wanted, run)


def _refuse_other_sizes(checkpoint: Checkpoint, state: RunState, loader: DataLoaderBase) -> None:
    """Refuse batch sizes that differ in the past; those of steps to come may change."""
    step = state.step
    old, new = state.batch_sizes.until(step), loader.batch_sizes.until(step)
    if old.size(0) != new.size(0):
        name = "data_loader.global_batch_size"
        _refuse([f"{name}: {old.size(0)} -> {new.size(0)}"], checkpoint)
    if old != new:
        _refuse([f"batch sizes up to step {step:,}: {old} -> {new}"], checkpoint)


def _config_of(checkpoint: Checkpoint, run: ResumableRun) -> JsonObject:
    """Return the configuration of a checkpoint in plain values, as the run's own has them.

    Fields of the model that the release which saved it did not know have the defaults of the run's
    class.

    Raises:
        ValidationError: it should be one of our own models, and has fields that ours do not have.
    """
    saved, kind = checkpoint.config, type(run.train_module.model_config)
    if saved["model"] == run.config["model"]:
        return saved
    model = saved["model"]
    if kind is DecoderConfig:
        known = own_parts(run.config["model"])  # of this run's own configuration
        model = as_dict(model_config(checkpoint, known=known))
    elif is_dataclass(kind):
        values = Values(copy.deepcopy(saved), file=f"{checkpoint.folder}/config.json")
        with contextlib.suppress(UsageError, NameError):  # then the differences say what is wrong
            model = as_dict(parse(kind, values, ("model",)))
    return {**saved, "model": model}


def _refuse(changed: list[str], checkpoint: Checkpoint) -> None:
    if changed:
        raise ValidationError(
            f"the checkpoint belongs to another configuration: {'; '.join(changed)}",
            where=str(checkpoint.folder),
            why="it could not go on as the same run",
            fix="use that of the checkpoint (its config.json), or another trainer.save_folder",
        )


T = TypeVar("T")


def mapping_of(
    callback: str, method: str, given: Mapping[str, T], kind: type[Any] = object
) -> Mapping[str, T]:
    """Return what a method of a callback gave.

    Args:
        callback: its name.
        kind: of the values.

    Raises:
        UsageError: it is no mapping, a name is no text, or a value of another kind.
    """
    where = f"{method}() of the callback {printable(callback)!r}"
    if not isinstance(given, Mapping) or any(not isinstance(name, str) for name in given):
        found = type(given).__name__
        raise UsageError(
            f"{where} returned a {found}{' with a name that is no text' * (found == 'dict')}",
            fix="return a mapping by name; an empty one if there is nothing",
        )
    for name, value in given.items():
        if not isinstance(value, kind):
            raise UsageError(
                f"{where} returned a {type(value).__name__} as {printable(name)!r}",
                why=f"each value is a {kind.__name__}",
                fix="numbers, text and lists belong in state_dict()",
            )
    return given


def upcycled(source: Checkpoint | ExportedWeights, module: TrainModule) -> Callable[[], None]:
    """Return what puts the weights of a dense model in place; every rank calls it.

    Raises:
        UsageError: the logits would not be those of the dense model.
        ValidationError: shape and weights do not fit each other.
    """
    config = module.model_config
    if type(config) is not DecoderConfig:
        raise UsageError("only a Decoder can begin with a dense model", where=OPTION)
    if isinstance(source, ExportedWeights):
        model = model_of(source, vocab_multiple=config.vocab_multiple)
        dense, tensors = model.config, dict(kept(model))
    else:
        dense, tensors = model_config(source), {}
        wanted = kept(build_decoder(dense, device="meta"))
        source.refuse_misfits({f"model.{name}": value for name, value in wanted}, ("model",))
    refuse_unequal(dense, config)

    def read(name: str, where: Slices) -> Tensor:
        if isinstance(source, ExportedWeights):
            return tensors[name][where]
        rows, *others = where
        place = (source.tensors, source.index, f"model.{name}")
        return read_rows(*place, rows.start, rows.stop)[(slice(None), *others)]

    @torch.no_grad()
    def fill(state: dict[str, Tensor]) -> None:
        for name, target in state.items():
            for part, where in local_blocks(target):
                if not part.numel() or ".router." in name:
                    continue
                if dense_name(name) is None:
                    part.copy_(read(name, where))
                else:
                    put_copies(part, where, name, read, config)

    def load() -> None:
        module.ensure_weights()
        state = module.state_dict()["model"]
        module.world.on_each(lambda: fill(state))
        module.load_state_dict({"model": state})

    return load
