"""Reading a checkpoint: find the newest one that verifies, then its JSON, then its tensors.

    candidates, newest first -> manifest -> sizes and sha256 -> train.json -> tensors

Never: unpickle or even parse a file whose sha256 is not the manifest's. DCP's `.metadata` is
unpickled from the very bytes that were hashed; other objects in a checkpoint are read with
`weights_only=True`.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from olm_data.errors import OlmError, ValidationError
from olm_train.checkpoint.manifest import STATE, TENSORS, Manifest, candidates
from olm_train.world import World, quiet_alone


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose every file has been verified."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.manifest.step

    def read_bytes(self, name: str) -> bytes | None:
        """Return the bytes of one of its files, checked again, or None when it has no such file."""
        if name not in [entry.name for entry in self.manifest.files]:
            return None
        data = (self.folder / name).read_bytes()
        if hashlib.sha256(data).hexdigest() != self.manifest.entry(name).sha256:
            raise ValidationError(f"{name} changed while it was read", where=str(self.folder))
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
            with quiet_alone(world):
                dcp.load(
                    tensors,
                    storage_reader=_VerifiedReader(self),
                    planner=_PlainLoadPlanner(),
                    process_group=world.exchange_group,
                    no_dist=world.size == 1,
                )
        except (dcp.api.CheckpointException, RuntimeError, ValueError, KeyError) as error:
            raise ValidationError(
                "the checkpoint does not fit this model and optimiser",
                where=str(self.folder),
                why=str(error).strip().splitlines()[-1] if str(error) else type(error).__name__,
                fix="use the configuration it was written with: config.json beside it",
            ) from error


def open_checkpoint(folder: Path, world: World) -> Checkpoint:
    """Return the checkpoint in `folder` after reading and checking all of it; every rank calls it.

    Raises:
        ValidationError: it is incomplete or damaged; the message names the files.
    """
    manifest = world.on_main(lambda: Manifest.read(folder))
    wrong = [
        problem
        for part in world.gather(manifest.problems(folder, share=world.rank, shares=world.size))
        for problem in part
    ]
    if wrong:
        raise ValidationError(
            f"checkpoint {folder.name} is damaged: {'; '.join(dict.fromkeys(wrong))}",
            where=str(folder),
        )
    return Checkpoint(folder, manifest)


def newest_checkpoint(
    save_folder: Path, world: World, on_damage: Callable[[OlmError], None]
) -> Checkpoint | None:
    """Return the newest checkpoint that verifies, None when there is none; every rank calls it.

    Args:
        save_folder: the run's folder.
        world: the ranks that read it together.
        on_damage: told about each newer one that does not verify.
    """
    for folder in world.on_main(lambda: candidates(save_folder)):
        try:
            return open_checkpoint(folder, world)
        except ValidationError as error:
            on_damage(error)
    return None


class _VerifiedReader(dcp.FileSystemReader):
    """DCP's reader, with the one pickle of the format hashed before it is unpickled."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.folder / TENSORS)
        self._checkpoint = checkpoint

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        data = self._checkpoint.read_bytes(f"{TENSORS}/.metadata")
        if data is None:
            raise ValidationError(
                "the checkpoint has no .metadata", where=str(self._checkpoint.folder)
            )
        metadata: Metadata = pickle.loads(data)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _PlainLoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's planner, with non-tensor values read as plain data instead of pickled objects."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        set_element(
            self.original_state_dict,
            self.mappings[read_item.dest_index.fqn],
            torch.load(value, weights_only=True),
        )
