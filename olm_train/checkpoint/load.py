"""Reading a checkpoint: find the newest one that verifies, then its JSON, then its tensors.

    candidates, newest first -> manifest -> sizes and sha256 -> train.json -> tensors

Never: parse a file whose sha256 is not the manifest's.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp

from olm_data.errors import InputError, OlmError, ValidationError
from olm_data.storage.store import Store, absolute
from olm_train.checkpoint.manifest import MANIFEST, METADATA, STATE, Manifest, step_of
from olm_train.checkpoint.place import candidates
from olm_train.checkpoint.reader import PlainLoadPlanner, VerifiedReader
from olm_train.world import World, quiet_alone


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, local or remote, whose every file has been verified.

    Attributes:
        store: its folder.
        manifest: what it holds.
    """

    store: Store
    manifest: Manifest

    @property
    def folder(self) -> str:
        """Its path or URL."""
        return self.store.root

    @property
    def name(self) -> str:
        """Name of its folder, such as step00000100."""
        return self.store.root.rpartition("/")[2]

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.manifest.step

    def read_bytes(self, name: str) -> bytes | None:
        """Return the bytes of one of its files, checked again, or None when it has no such file."""
        if name not in [entry.name for entry in self.manifest.files]:
            return None
        data = self.store.read(name)
        if hashlib.sha256(data).hexdigest() != self.manifest.entry(name).sha256:
            raise ValidationError(f"{name} changed while it was read", where=self.folder)
        return data

    def read_json(self, name: str) -> Any:
        """Return the value of one of its JSON files, or None when it has no such file."""
        data = self.read_bytes(name)
        return None if data is None else json.loads(data)

    def state(self) -> dict[str, Any]:
        """Return the trainer's state, `train.json`."""
        state: dict[str, Any] = self.read_json(STATE)
        return state

    def load_tensors(self, tensors: dict[str, Any], world: World) -> None:
        """Fill the tensors of a state dict in place, whatever ranks and sharding wrote them.

        Raises:
            ValidationError: the checkpoint lacks a tensor, or has it in another shape.
        """
        try:
            quiet_alone(world)
            dcp.load(
                tensors,
                storage_reader=VerifiedReader(self.store, self.read_bytes(METADATA)),
                planner=PlainLoadPlanner(),
                process_group=world.exchange_group,
                no_dist=world.size == 1,
            )
        except (dcp.api.CheckpointException, RuntimeError, ValueError, KeyError) as error:
            raise ValidationError(
                "the checkpoint does not fit this model and optimiser",
                where=self.folder,
                why=str(error).strip().splitlines()[-1] if str(error) else type(error).__name__,
                fix="use the configuration it was written with: config.json beside it",
            ) from error


def open_checkpoint(folder: str | os.PathLike[str], world: World) -> Checkpoint:
    """Return the checkpoint in `folder` after reading and checking all of it; every rank calls it.

    Raises:
        ValidationError: it is incomplete or damaged; the message names the files.
    """
    store = Store(folder)
    manifest = world.on_main(lambda: Manifest.read(store))
    wrong = [
        problem
        for part in world.gather(manifest.problems(store, share=world.rank, shares=world.size))
        for problem in part
    ]
    checkpoint = Checkpoint(store, manifest)
    if wrong:
        raise ValidationError(
            f"checkpoint {checkpoint.name} is damaged: {'; '.join(dict.fromkeys(wrong))}",
            where=store.root,
        )
    return checkpoint


def newest_checkpoint(
    save_folder: str | os.PathLike[str],
    world: World,
    on_damage: Callable[[OlmError], None],
    *,
    at_most: int | None = None,
) -> Checkpoint | None:
    """Return the newest checkpoint that verifies, None when there is none; every rank calls it.

    Args:
        save_folder: the run's folder.
        world: the ranks that read it together.
        on_damage: told about each newer one that does not verify.
        at_most: the last step that counts; None: any.
    """
    for name in world.on_main(lambda: candidates(save_folder)):
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
    if step_of(text.rpartition("/")[2]) is not None or Store(text).exists(MANIFEST):
        return open_checkpoint(text, world)
    found = newest_checkpoint(text, world, on_damage)
    if found is not None:
        return found
    raise InputError(
        "there is no checkpoint that verifies",
        where=text,
        fix="give the folder of a checkpoint, or the trainer.save_folder of a run that saved one",
    )
