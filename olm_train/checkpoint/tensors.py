"""The tensors of a checkpoint, one safetensors file a rank, and an index of all.

    write: the plan of torch's distributed checkpoint: which rank writes which box of which tensor
               -> rank00000.safetensors, rank00001.safetensors, ...   fsynced
               -> index.json, by the coordinator
    read:  index.json, checked -> the boxes that this rank holds a part of
               -> one ranged read a box, of its rows alone -> tensor

The index is what is read: one file instead of a header for each rank. The headers are there so
that other programs can open the files.

Never: pickle. torch's own storage would put each box and the index into one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from olm_data.bounded_json import JsonObject
from olm_data.errors import UsageError, ValidationError
from olm_data.storage.disk import write_durable
from olm_data.storage.store import Store
from olm_train.checkpoint.index import DTYPES, TAGS, Chunk, Index, TensorEntry
from olm_train.checkpoint.manifest import INDEX_NAME, TENSORS

Piece = tuple[str, int, tuple[int, ...]]
"""Name of the file, first byte in it, sizes."""


def tensors_file(rank: int) -> str:
    """Return the name of the file with the tensors that a rank writes."""
    return f"rank{rank:05d}.safetensors"


class Box(NamedTuple):
    """A part of a tensor: the tensor's name, the dtype, its shape, where it begins in it."""

    tensor: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """How many."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorsFile:
    """A safetensors file; made when it gets boxes, durable when it ends.

    Args:
        path: of the file.
        boxes: what will be added, in this order; not empty ones.
    """

    def __init__(self, path: Path, boxes: Sequence[Box]) -> None:
        self._file: BinaryIO | None = None
        if boxes:
            header = _header(boxes)
            self._file = open(path, "wb")  # noqa: SIM115  # closed by __exit__
            self._file.write(len(header).to_bytes(8, "little") + header)

    def __enter__(self) -> TensorsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is not None:
            with self._file as file:
                if kind is None:
                    file.flush()
                    os.fsync(file.fileno())

    def add(self, tensor: Tensor) -> int:
        """Write the elements of the next box row by row; return where they begin."""
        assert self._file is not None
        start = self._file.tell()
        self._file.write(bytes_of(tensor))
        return start


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor row by row, as they lie in a file."""
    plain = tensor.detach().cpu().resolve_conj().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data


def _header(boxes: Sequence[Box]) -> bytes:
    """Return the header of the file; a box that begins a tensor has its name alone."""
    tags = {dtype: tag for tag, dtype in TAGS.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for box in boxes:
        place = ",".join(map(str, box.offsets)) if any(box.offsets) else ""
        entries[f"{box.tensor}@{place}" if place else box.tensor] = {
            "dtype": tags[box.dtype],
            "shape": box.shape,
            "data_offsets": (at, at := at + box.bytes),
        }
    data = msgspec.json.encode(entries)
    return data + b" " * (-len(data) % 8)


class IndexedWriter(StorageWriter):
    """The writing side of DCP: this rank's file, and on the coordinator the index.

    Args:
        folder: where the files go; local, and there.
        rank: of this process.
        values: what is no tensor, in JSON, for the index.
    """

    def __init__(self, folder: Path, rank: int, values: JsonObject) -> None:
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
        items = [(item, box) for item in plan.items if (box := _box(item)).bytes]
        with TensorsFile(self._folder / self._name, [box for _, box in items]) as file:
            for item, box in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                assert tensor.shape == box.shape
                piece: Piece = (self._name, file.add(tensor), box.shape)
                written.append(WriteResult(item.index, box.bytes, piece))
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


def _box(item: WriteItem) -> Box:
    """Return what an item of a plan writes."""
    data = item.tensor_data
    assert data is not None  # values were taken out before the plan
    name, dtype = item.index.fqn, data.properties.dtype
    dtype_name(dtype, name)
    return Box(name, dtype, tuple(data.chunk.sizes), tuple(data.chunk.offsets))


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


@torch.no_grad()
def fill(tensors: Mapping[str, Tensor], files: Store, index: Index) -> None:
    """Fill tensors in place, whatever ranks and sharding wrote them; each rank reads its own part.

    Args:
        tensors: by name; whole ones or DTensors, in the shapes that the index has.
        files: folder of the files of a checkpoint that has been verified.
        index: its index, checked.

    Raises:
        ValidationError: a file became shorter.
    """
    parts = []
    for name, tensor in tensors.items():
        held, start = _held(tensor)
        for chunk in index.tensors[name].chunks:
            boxes = zip(chunk.offsets, chunk.sizes, start, held.shape, strict=True)
            shared = [(max(a, b), min(a + n, b + m)) for a, n, b, m in boxes]
            if all(first < stop for first, stop in shared):
                parts.append((chunk, name, shared, held[_slices(shared, start)]))
    for chunk, name, shared, target in sorted(parts, key=lambda p: (p[0].file, p[0].start)):
        target.copy_(_read(files, index, name, chunk, shared))


def read_rows(files: Store, index: Index, name: str, first: int, stop: int) -> Tensor:
    """Return rows [first, stop) of a tensor, on the CPU, in its own dtype; only they are read.

    Args:
        files, index: as for `fill`.
        name: of a tensor that is no scalar.
        first, stop: rows that it has.

    Raises:
        ValidationError: a file became shorter.
    """
    entry = index.tensors[name]
    start = (first, *[0] * (len(entry.shape) - 1))
    found = torch.empty((stop - first, *entry.shape[1:]), dtype=entry.torch_dtype)
    for chunk in entry.chunks:
        rows = (max(first, chunk.offsets[0]), min(stop, chunk.offsets[0] + chunk.sizes[0]))
        if rows[0] < rows[1]:
            others = zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)
            wanted = [rows, *((at, at + size) for at, size in others)]
            found[_slices(wanted, start)] = _read(files, index, name, chunk, wanted)
    return found


def _held(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return what this rank holds of a tensor, and where in the whole that begins."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    (box,) = tensor.__create_chunk_list__()  # as torch's own loader asks
    return tensor.to_local(), tuple(box.offsets)


def _slices(bounds: Sequence[tuple[int, int]], start: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - at, b - at) for (a, b), at in zip(bounds, start, strict=True))


def _read(
    files: Store, index: Index, name: str, chunk: Chunk, wanted: Sequence[tuple[int, int]]
) -> Tensor:
    """Return the part of a chunk between bounds in the whole tensor; only its rows are read."""
    dtype, window = index.tensors[name].torch_dtype, _slices(wanted, chunk.offsets)
    row = math.prod(chunk.sizes[1:]) * dtype.itemsize  # bytes
    first, stop = (window[0].start, window[0].stop) if window else (0, 1)
    file = f"{TENSORS}/{index.files[chunk.file]}"
    data = bytearray(files.read(file, chunk.start + first * row, chunk.start + stop * row))
    if len(data) != (stop - first) * row:
        raise ValidationError(f"{file} became shorter while it was read", where=files.root)
    tensor = torch.frombuffer(data, dtype=dtype)
    if not window:
        return tensor.reshape(())  # a scalar has no dimension
    return tensor.reshape(stop - first, *chunk.sizes[1:])[:, *window[1:]]
