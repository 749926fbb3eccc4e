"""Reads the tensors of a verified checkpoint for torch's distributed checkpoint, local or remote.

    .metadata, bytes that were hashed -> where each tensor's pieces lie
                                      -> one ranged read a piece -> narrowed -> target

Never: unpickle anything but those hashed bytes; pieces and objects are read with
`weights_only=True`, and only from files that the format names.
"""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from olm_data.errors import ValidationError
from olm_data.storage.store import Store
from olm_train.checkpoint.manifest import METADATA, TENSORS


class VerifiedReader(StorageReader):
    """The reading side of `dcp.FileSystemWriter`, over a store.

    Args:
        store: folder of a checkpoint whose files have been verified.
        metadata: bytes of its `.metadata` with the manifest's sha256; None: it has none.

    Raises:
        ValidationError: there is no `.metadata`.
    """

    def __init__(self, store: Store, metadata: bytes | None) -> None:
        if metadata is None:
            raise ValidationError(f"the checkpoint has no {METADATA}", where=store.root)
        self._store, self._metadata = store, metadata
        self._places: dict[Any, Any] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never asked: the reader is handed over ready."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load."""
        self._places = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's index of the tensors."""
        metadata: Metadata = pickle.loads(self._metadata)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take over where each piece lies."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan, which needs nothing."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, which need nothing."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of this rank's plan, in the order in which they lie in the files."""

        def place_of(item: ReadItem) -> tuple[str, int]:
            place = self._places[item.storage_index]
            return place.relative_path, place.offset

        for item in sorted(plan.items, key=place_of):
            place = self._places[item.storage_index]
            name = f"{TENSORS}/{place.relative_path}"
            data = io.BytesIO(self._store.read(name, place.offset, place.offset + place.length))
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, data)
                continue
            tensor = torch.load(data, map_location="cpu", weights_only=True)
            window = zip(item.storage_offsets, item.lengths, strict=True)
            target = planner.resolve_tensor(item).detach()
            target.copy_(tensor[tuple(slice(start, start + length) for start, length in window)])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class PlainLoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's planner, with non-tensor values read as plain data instead of pickled objects."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is no tensor where it belongs."""
        set_element(
            self.original_state_dict,
            self.mappings[read_item.dest_index.fqn],
            torch.load(value, weights_only=True),
        )
