"""Reads the tensors of a verified checkpoint for torch's distributed checkpoint, local or remote.

    index.json, checked -> DCP's plan: which boxes this rank needs
                        -> one ranged read a box, of its rows alone -> narrowed -> target

Never: unpickle. DCP's own index and pieces are pickles, so it is given ours, made in memory.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from olm_data.errors import ValidationError
from olm_data.storage.store import Store
from olm_train.checkpoint.index import Chunk, Index
from olm_train.checkpoint.manifest import TENSORS


class IndexedReader(StorageReader):
    """The reading side of `writer.IndexedWriter`, over a store.

    Args:
        store: folder of a checkpoint whose files have been verified.
        index: its index, checked.
    """

    def __init__(self, store: Store, index: Index) -> None:
        self._store, self._index = store, index
        self._chunks = {
            MetadataIndex(name, chunk.offsets): chunk
            for name, tensor in index.tensors.items()
            for chunk in tensor.chunks
        }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never asked: the reader is handed over ready."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load, which needs nothing."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index in DCP's classes."""
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.torch_dtype),
                    torch.Size(tensor.shape),
                    [
                        ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
                        for c in tensor.chunks
                    ],
                )
                for name, tensor in self._index.tensors.items()
            },
            storage_meta=StorageMeta(),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Prepare nothing: where each box lies is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan, which needs nothing."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, which need nothing."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of this rank's plan, in the order in which they lie in the files."""

        def place_of(item: ReadItem) -> tuple[int, int]:
            chunk = self._chunks[item.storage_index]
            return chunk.file, chunk.start

        for item in sorted(plan.items, key=place_of):
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._window(item, self._chunks[item.storage_index]))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _window(self, item: ReadItem, chunk: Chunk) -> Tensor:
        """Return the part of a chunk that an item asks for; only its rows are read."""
        dtype = self._index.tensors[item.storage_index.fqn].torch_dtype
        sizes, window = chunk.sizes, list(zip(item.storage_offsets, item.lengths, strict=True))
        first, rows = window[0] if window else (0, 1)
        row = math.prod(sizes[1:]) * dtype.itemsize  # bytes
        start, length = chunk.start + first * row, rows * row
        name = f"{TENSORS}/{self._index.files[chunk.file]}"
        data = bytearray(self._store.read(name, start, start + length))
        if len(data) != length:
            raise ValidationError(
                f"{name} became shorter while it was read", where=self._store.root
            )
        tensor = torch.frombuffer(data, dtype=dtype)
        if not window:
            return tensor.reshape(())  # a scalar has no dimension
        tensor = tensor.reshape(rows, *sizes[1:])
        return tensor[:, *(slice(at, at + size) for at, size in window[1:])]
