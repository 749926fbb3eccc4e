"""Reading a checkpoint: find the newest one that verifies, then its JSON, then its tensors.

candidates, newest first -> manifest -> sizes and sha256 -> index -> train.json -> tensors
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from olm_data.bounded_json import JsonObject, MalformedJson, decode
from olm_data.errors import OlmError, ValidationError
from olm_data.path_kinds import NO_TEXT, kind_of, wrong_kind
from olm_data.regular_files import MAX_DOCUMENT
from olm_data.storage.store import Store, absolute
from olm_train.checkpoint.documents import RunState
from olm_train.checkpoint.manifest import (
    CONFIG,
    INDEX,
    MANIFEST,
    STATE,
    TENSORS,
    CheckpointManifest,
    candidates,
    no_checkpoint,
    step_of,
)
from olm_train.checkpoint.state import StateDict, flatten, put_back, split
from olm_train.checkpoint.tensors import MAX_BYTES, Index, fill
from olm_train.distributed.world import World
from olm_train.model.flat_form import from_flat
from olm_train.model.shards import misfits, shapes


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, local or remote, whose every file has been verified.

    Attributes:
        store: its folder.
        manifest: what it holds.
    """

    store: Store
    manifest: CheckpointManifest

    @property
    def folder(self) -> str:
        """Its path or URL."""
        return self.store.root

    @property
    def files(self) -> Store:
        """The folder that its files lie in."""
        return self.manifest.files_in(self.store)

    @property
    def tensors(self) -> Store:
        """Where the files of its tensors lie."""
        return self.files.child(TENSORS)

    @property
    def name(self) -> str:
        """Name of its folder, such as step00000100."""
        return self.store.root.rpartition("/")[2]

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.manifest.step

    def read_bytes(self, name: str, limit: int = MAX_DOCUMENT) -> bytes | None:
        """Return the bytes of one of its files, checked again, or None when it has no such file."""
        entry = next((each for each in self.manifest.files if each.name == name), None)
        if entry is None:
            return None
        data = self.files.read(name, limit=min(entry.bytes, limit))
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise ValidationError(f"{name} changed while it was read", where=self.folder)
        return data

    def read_json(self, name: str) -> Any:
        """Return the value of one of its JSON files, or None when it has no such file."""
        data = self.read_bytes(name)
        try:
            return None if data is None else decode(data)
        except MalformedJson as error:
            raise ValidationError(
                f"{name} is not JSON that a run writes", where=self.folder, why=str(error)
            ) from error

    @cached_property
    def state(self) -> RunState:
        """The state of its run, `train.json`.

        Raises:
            ValidationError: it is not what a trainer writes.
        """
        try:
            state = RunState.of(self.read_json(STATE))
        except MalformedJson as error:
            raise ValidationError(
                f"{STATE} is not what a trainer writes: {error}", where=self.folder
            ) from error
        if state.step != self.step:
            raise ValidationError(
                f"{STATE} is of step {state.step:,}, its checkpoint of step {self.step:,}",
                where=self.folder,
            )
        return state

    @cached_property
    def config(self) -> JsonObject:
        """The configuration of its run, `config.json`.

        Raises:
            ValidationError: it is no mapping with a model.
        """
        config = self.read_json(CONFIG)
        if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
            raise ValidationError(f"{CONFIG} is not the configuration of a run", where=self.folder)
        return {**config, "model": from_flat(config["model"])}

    @cached_property
    def index(self) -> Index:
        """What it holds by name: tensors with dtype and shape, and plain values.

        Raises:
            ValidationError: it is damaged, or speaks of bytes that there are not.
        """
        where, data = self.files.url(INDEX), self.read_bytes(INDEX, MAX_BYTES)
        if data is None:
            raise ValidationError(f"the checkpoint has no {INDEX}", where=self.folder)
        index = Index.decode(data, where)
        beside = {
            entry.name.removeprefix(f"{TENSORS}/"): entry.bytes
            for entry in self.manifest.files
            if entry.name.startswith(f"{TENSORS}/") and entry.name != INDEX
        }
        index.check(beside, where)
        return index

    def names(self, part: str) -> set[str]:
        """Return what it holds of a part of the state, such as "optim": tensors and values."""
        held, prefix = self.index.tensors.keys() | self.index.values.keys(), f"{part}."
        return {name.removeprefix(prefix) for name in held if name.startswith(prefix)}

    def load_tensors(self, tensors: StateDict, world: World) -> None:
        """Fill a nested state: tensors in place, whatever ranks and sharding wrote them; values.

        Raises:
            ValidationError: the checkpoint lacks a tensor or value, has it in another shape or kind
                of number, or has one that is not asked for in a part, such as `optim`, that is.
        """
        flat = flatten(tensors)
        self.refuse_misfits(flat, tuple(tensors), elsewhere=held_elsewhere(flat, world))
        put_back(tensors, self.index.values)
        self._fill(split(flat)[0], world)

    def whole_tensors(self, prefix: str, names: Iterable[str], world: World) -> dict[str, Tensor]:
        """Return tensors, whole, on the CPU, by their names without a prefix; every rank calls it.

        Raises:
            ValidationError: the bytes are damaged.
        """
        entries = {name: self.index.tensors[f"{prefix}{name}"] for name in names}
        found = {n: torch.empty(e.shape, dtype=e.torch_dtype) for n, e in entries.items()}
        self._fill({f"{prefix}{name}": tensor for name, tensor in found.items()}, world)
        return found

    def _fill(self, named: Mapping[str, Tensor], world: World) -> None:
        world.on_each(lambda: fill(named, self.tensors, self.index))

    def refuse_misfits(
        self, wanted: StateDict, parts: tuple[str, ...], elsewhere: Collection[str] = ()
    ) -> None:
        """Refuse tensors and values, by name, that it does not hold just so.

        Args:
            wanted: flat.
            parts: of the state that hold nothing else.
            elsewhere: names that other ranks want.

        Raises:
            ValidationError: as `load_tensors`.
        """
        index, prefixes = self.index, tuple(f"{part}." for part in parts)
        there = {
            name: leaf
            for name, leaf in shapes({**index.values, **index.tensors}).items()
            if name in wanted or (name.startswith(prefixes) and name not in elsewhere)
        }
        wrong = misfits(shapes(wanted), there)
        wrong += [
            f"{name} is of {index.tensors[name].dtype}, here of {str(leaf.dtype)[6:]}"
            for name, leaf in sorted(wanted.items())
            if isinstance(leaf, Tensor)
            and name in index.tensors
            and not _convertible(index.tensors[name].torch_dtype, leaf.dtype)
        ]
        if wrong:
            more = f"; and {len(wrong) - 5:,} more" if len(wrong) > 5 else ""
            raise ValidationError(
                "the checkpoint does not fit this model and optimiser",
                where=self.folder,
                why="; ".join(wrong[:5]) + more,
                fix="use the configuration it was written with: config.json in it",
            )


def held_elsewhere(names: Iterable[str], world: World) -> set[str]:
    """Return the names that ranks with other layers have in the place of these; every rank calls
    it."""
    return set() if world.stages == 1 else {n for each in world.gather([*names]) for n in each}


def _convertible(there: torch.dtype, here: torch.dtype) -> bool:
    """Whether numbers keep their meaning: those of another precision do, of another kind do not."""
    return there == here or (there.is_floating_point and here.is_floating_point)


def open_checkpoint(folder: str | os.PathLike[str], world: World) -> Checkpoint:
    """Return the checkpoint in `folder` after reading and checking all of it; every rank calls it.

    Raises:
        ValidationError: it is incomplete or damaged; the message names the files.
    """
    store = Store(folder)
    manifest = world.on_main(lambda: CheckpointManifest.read(store))
    wrong = [
        problem
        for part in world.gather(manifest.problems(store, share=world.rank, shares=world.size))
        for problem in part
    ]
    checkpoint = Checkpoint(store, manifest)
    if not wrong:
        wrong = world.on_main(lambda: _wrong_index(checkpoint))
    if wrong:
        raise ValidationError(
            f"checkpoint {checkpoint.name} is damaged: {'; '.join(dict.fromkeys(wrong))}",
            where=store.root,
        )
    return checkpoint


def _wrong_index(checkpoint: Checkpoint) -> list[str]:
    try:
        _ = checkpoint.index
    except ValidationError as error:
        return [f"{error.what}: {error.why}" if error.why else error.what]
    return []


def newest_checkpoint(
    save_folder: str | os.PathLike[str],
    world: World,
    on_damage: Callable[[OlmError], None],
    *,
    names: Sequence[str] | None = None,
    at_most: int | None = None,
) -> Checkpoint | None:
    """Return the newest checkpoint that verifies, None when there is none; every rank calls it.

    Args:
        save_folder: the run's folder.
        world: the ranks that read it together.
        on_damage: told about each newer one that does not verify.
        names: what `candidates` returned; None: not looked yet.
        at_most: the last step that counts; None: any.
    """
    for name in world.on_main(lambda: candidates(save_folder)) if names is None else names:
        if at_most is not None and (step_of(name) or 0) > at_most:
            continue
        try:
            return open_checkpoint(Store(save_folder).url(name), world)
        except ValidationError as error:
            on_damage(error)
    return None


def find_checkpoint(
    place: str | os.PathLike[str], world: World, on_damage: Callable[[OlmError], None]
) -> Checkpoint:
    """Return the checkpoint at `place`, or the newest good one of the run there; every rank calls.

    Args:
        place: folder of a checkpoint or of a run, local or remote.
        world: the ranks that read it together.
        on_damage: told about each newer one that does not verify.

    Raises:
        InputError: the run has no good one.
        ValidationError: it is damaged.
    """
    text = absolute(os.fspath(place)).rstrip("/")
    if (kind := kind_of(text)) in NO_TEXT - {"checkpoint", "tokenizer", "model"}:
        raise wrong_kind(os.fspath(place), str(kind), "run")
    if step_of(text.rpartition("/")[2]) is not None or Store(text).exists(MANIFEST):
        return open_checkpoint(text, world)
    found = newest_checkpoint(text, world, on_damage)
    if found is not None:
        return found
    raise no_checkpoint(text)
