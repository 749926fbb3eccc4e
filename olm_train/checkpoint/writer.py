"""Writes the tensors of a checkpoint as bare bytes, one file a rank, and an index of them.

    DCP's plan: which rank writes which box of which tensor
        -> rank00000.bin, rank00001.bin, ...   row by row, little-endian, fsynced
        -> index.json, by the coordinator

Never: pickle. torch's own writer would put each box and the index into one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from olm_data.errors import UsageError
from olm_data.storage.disk import write_durable
from olm_train.checkpoint.index import DTYPES, Chunk, Index, TensorEntry
from olm_train.checkpoint.manifest import INDEX_NAME

Piece = tuple[str, int, tuple[int, ...]]
"""Name of the file, first byte in it, sizes."""


def tensors_file(rank: int) -> str:
    """Return the name of the file with the tensors that a rank writes."""
    return f"rank{rank:05d}.bin"


class TensorsFile:
    """A file of tensors, one after another; made when the first one comes, durable when it ends.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def __enter__(self) -> TensorsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            with self._file as file:
                if error is None:
                    file.flush()
                    os.fsync(file.fileno())

    def add(self, tensor: Tensor) -> int:
        """Write the elements of a dense tensor row by row; return where they begin."""
        if self._file is None:
            self._file = open(self.path, "wb")  # noqa: SIM115  # closed by __exit__
        start = self._file.tell()
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        self._file.write(plain.view(torch.uint8).numpy().data)
        return start


class IndexedWriter(StorageWriter):
    """The writing side of DCP: this rank's file, and on the coordinator the index.

    Args:
        folder: where the files go; local, and there.
        rank: of this process.
        values: what is no tensor, in JSON, for the index.
    """

    def __init__(self, folder: Path, rank: int, values: Mapping[str, Any]) -> None:
        self._folder, self._name, self._values = folder, tensors_file(rank), dict(values)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never asked: the writer is handed over ready."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save, which needs nothing."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare nothing: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan, which needs nothing."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans, which need nothing."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes of the tensors; tell the coordinator where each one lies."""
        written = []
        with TensorsFile(self._folder / self._name) as file:
            for item in plan.items:
                assert item.tensor_data is not None  # values were taken out before the plan
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                if tensor.numel():
                    sizes = tuple(item.tensor_data.chunk.sizes)
                    piece: Piece = (self._name, file.add(tensor), sizes)
                    size = tensor.numel() * tensor.element_size()
                    written.append(WriteResult(item.index, size, piece))
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; on the coordinator, when all ranks have written."""
        pieces: dict[str, list[tuple[tuple[int, ...], Piece]]] = {}
        for result in (result for part in results for result in part):
            offsets = tuple(result.index.offset or ())
            pieces.setdefault(result.index.fqn, []).append((offsets, result.storage_data))
        files = sorted({piece[0] for found in pieces.values() for _, piece in found})
        numbers = {name: number for number, name in enumerate(files)}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            tensors[name] = TensorEntry(
                dtype=dtype_name(entry.properties.dtype, name),
                shape=tuple(entry.size),
                chunks=tuple(
                    Chunk(numbers[file], start, offsets, sizes)
                    for offsets, (file, start, sizes) in sorted(pieces.get(name, ()))
                ),
            )
        index = Index(files=tuple(files), tensors=tensors, values=self._values)
        write_durable(self._folder / INDEX_NAME, index.encode())


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """Return the name of a dtype in the index.

    Raises:
        UsageError: the format has no such dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UsageError(
            f"a checkpoint cannot hold {tensor}: its dtype is {name}",
            where="state_dict() of the train module",
            fix=f"return it in one of {', '.join(DTYPES)}",
        )
    return name
