"""The tensors of a checkpoint, one safetensors file a rank, and an index of all.

    write: the plan of torch's distributed checkpoint: which rank writes which box of which tensor
               -> rank00000.safetensors, rank00001.safetensors, ...   fsynced
               -> index.json, by the coordinator
    read:  index.json, checked -> the boxes that this rank holds a part of
               -> one ranged read a box, of its rows alone -> tensor

The index is what is read: one file instead of a header for each rank. The headers are there so
that other programs can open the files.

Never: pickle. torch's own storage would put each box and the index into one.

`model_and_optim/index.json`: where the bytes of each tensor lie, and what is no tensor.

    {"format": "olm-tensors", "version": 1,
     "files": ["rank00000.safetensors", ...],
     "tensors": {"model.norm.weight": {"dtype": "float32", "shape": [16],
                                       "chunks": [[0, 4096, [0], [16]]]}},
     "values": {"optim.norm.weight.step": 3}}

A chunk is [number of the file, first byte, offsets in the tensor, sizes]: a box of the tensor, its
elements row by row, little-endian. The chunks of a tensor tile it; no byte belongs to two chunks.
So a tensor is never larger than the bytes that lie there, whoever wrote the index.

Never: unpickle, open a file, or believe a number before `check` has.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from olm_data.bounded_json import JsonObject, check
from olm_data.decoding import decode_typed
from olm_data.errors import UsageError, ValidationError
from olm_data.storage.disk import write_durable
from olm_data.storage.store import Store, refuse_unreadable
from olm_train.checkpoint.manifest import INDEX_NAME
from olm_train.model.shards import local_blocks

FORMAT, VERSION = "olm-tensors", 1
MAX_BYTES = 512 << 20
"""Of the file: about ten million chunks."""
MAX_DIMENSIONS = 8
MAX_NAME = 1024

TAGS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "C128": torch.complex128,
}  # fmt: skip
"""By name in the header of a safetensors file; the last one the library does not know."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TAGS.values()}
"""By name in the index: the only ones a tensor may have."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A box of a tensor: file number, first byte in it, first element and size by dimension."""

    file: Count
    start: Count
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]

    @property
    def elements(self) -> int:
        """How many elements it holds."""
        return math.prod(self.sizes)


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor: dtype as in `DTYPES`, shape, and the chunks that tile it."""

    dtype: str
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its dtype."""
        return DTYPES[self.dtype]


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file.

    Attributes:
        files: names of the files with tensors, right beside the index.
        tensors: by name.
        values: what is no tensor, by name, in the JSON of `state.to_json`.
    """

    format: str = FORMAT
    version: int = VERSION
    files: tuple[str, ...] = ()
    tensors: dict[str, TensorEntry] = {}
    values: JsonObject = {}

    def encode(self) -> bytes:
        """Return the bytes of the file.

        Raises:
            InputError: there are more than `decode` takes.
        """
        data = msgspec.json.encode(self, order="sorted") + b"\n"
        refuse_unreadable(len(data), MAX_BYTES, "the index of the tensors")
        return data

    @classmethod
    def decode(cls, data: bytes, where: str) -> Index:
        """Read the bytes of the file; what the numbers say of files is for `check`.

        Raises:
            ValidationError: they are no index, of another version, or not as `encode` spells them.
        """
        try:
            if len(data) > MAX_BYTES:
                raise ValueError(f"{len(data):,} bytes are more than {MAX_BYTES:,}")
            check([data])
            index = decode_typed(data, cls)
            if (index.format, index.version) != (FORMAT, VERSION):
                raise ValueError(f"it is {index.format} version {index.version}")
            if index.encode() != data:
                raise ValueError("it is not in the one spelling that the format has")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ValidationError(
                "the index of the tensors is damaged",
                where=where,
                why=str(error)[:200],
            ) from error
        return index

    def check(self, sizes: Mapping[str, int], where: str) -> None:
        """Check that the tensors are made of bytes that there are, each used once.

        Args:
            sizes: bytes of each file beside the index that the manifest lists.
            where: path or URL of the index.

        Raises:
            ValidationError: they are not.
        """
        problem = self._problem(sizes)
        if problem is not None:
            raise ValidationError(
                "the index of the tensors is damaged", where=where, why=problem[:200]
            )

    def _problem(self, sizes: Mapping[str, int]) -> str | None:
        if sorted(self.files) != sorted(sizes) or not all(map(_FILE.fullmatch, self.files)):
            return f"it is about the files {', '.join(self.files)}, not {', '.join(sizes)}"
        extents: list[list[tuple[int, int]]] = [[] for _ in self.files]
        both = self.tensors.keys() & self.values.keys()
        for name in (*both, *self.tensors, *self.values):
            if name in both or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
                return f"{name[:80]!r} is not the name of a tensor"
        for name, tensor in self.tensors.items():
            if tensor.dtype not in DTYPES:
                return f"{name} has the dtype {tensor.dtype}"
            if len(tensor.shape) > MAX_DIMENSIONS:
                return f"{name} has {len(tensor.shape)} dimensions"
            if not _tiles(tensor.shape, tensor.chunks):
                return f"the chunks of {name} do not tile its shape {list(tensor.shape)}"
            itemsize = tensor.torch_dtype.itemsize
            for chunk in tensor.chunks:
                stop = chunk.start + chunk.elements * itemsize
                if chunk.file >= len(self.files) or stop > sizes[self.files[chunk.file]]:
                    return f"a chunk of {name} lies beyond the end of its file"
                extents[chunk.file].append((chunk.start, stop))
        for file, found in zip(self.files, extents, strict=True):
            found.sort()
            if any(stop > start for (_, stop), (start, _) in itertools.pairwise(found)):
                return f"two chunks share bytes of {file}"
        return None


def _tiles(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Whether every element of a tensor is in exactly one chunk; time linear in the chunks.

    Boxes inside a shape tile it if their volumes add up to its volume and the corners that an odd
    number of them share are the corners of the shape: the latter says that every element is covered
    an odd number of times, so at least once, and the former that none is covered more often.
    """
    boxes = [tuple(zip(c.offsets, c.sizes, strict=False)) for c in chunks]
    for chunk, box in zip(chunks, boxes, strict=True):
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            return False
        if any(size < 1 or start + size > whole for (start, size), whole in zip(box, shape)):  # noqa: B905  # just compared
            return False
    if sum(chunk.elements for chunk in chunks) != math.prod(shape):
        return False
    if len(chunks) <= 1:
        return True
    odd: set[tuple[int, ...]] = set()
    for box in (*boxes, tuple((0, size) for size in shape)):
        odd ^= set(itertools.product(*((start, start + size) for start, size in box)))
    return not odd


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


class StoredPiece(NamedTuple):
    """A box in a file: the tensor's name, where it begins in it, the file, first byte, sizes."""

    tensor: str
    offsets: tuple[int, ...]
    file: str
    start: int
    sizes: tuple[int, ...]


class TensorsFile:
    """A safetensors file; made when it gets boxes, durable when it ends.

    Args:
        path: of the file.
        boxes: what will be added, in this order; not empty ones.
    """

    def __init__(self, path: Path, boxes: Sequence[Box]) -> None:
        self._file: BinaryIO | None = None
        self._name, self._boxes = path.name, iter(boxes)
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

    def add(self, tensor: Tensor) -> StoredPiece:
        """Write the elements of the next box row by row; return where they are."""
        assert self._file is not None
        box, start = next(self._boxes), self._file.tell()
        self._file.write(bytes_of(tensor))
        return StoredPiece(box.tensor, box.offsets, self._name, start, box.shape)


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
                written.append(WriteResult(item.index, box.bytes, file.add(tensor)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; on the coordinator, when all ranks have written."""
        wholes = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            wholes[name] = dtype_name(entry.properties.dtype, name), tuple(entry.size)
        pieces = [found.storage_data for part in results for found in part]
        write_durable(self._folder / INDEX_NAME, index_of(pieces, wholes, self._values).encode())


def index_of(
    pieces: Sequence[StoredPiece],
    wholes: Mapping[str, tuple[str, tuple[int, ...]]],
    values: JsonObject,
) -> Index:
    """Return the index of what was written.

    Args:
        pieces: of all files.
        wholes: dtype and shape of each tensor.
        values: what is no tensor.
    """
    found: dict[str, list[StoredPiece]] = {}
    for piece in pieces:
        found.setdefault(piece.tensor, []).append(piece)
    files = sorted({piece.file for piece in pieces})
    numbers = {name: number for number, name in enumerate(files)}
    tensors = {
        name: TensorEntry(
            dtype=dtype,
            shape=shape,
            chunks=tuple(
                Chunk(numbers[piece.file], piece.start, piece.offsets, piece.sizes)
                for piece in sorted(found.get(name, ()))
            ),
        )
        for name, (dtype, shape) in wholes.items()
    }
    return Index(files=tuple(files), tensors=tensors, values=values)


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
        files: folder of the tensors of a checkpoint that has been verified.
        index: its index, checked.

    Raises:
        ValidationError: a file became shorter.
    """
    blocks = [
        (name, held, [place.start for place in where])
        for name, tensor in tensors.items()
        for held, where in local_blocks(tensor)
    ]
    _fill_blocks(blocks, files, index)


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
    found = torch.empty((stop - first, *entry.shape[1:]), dtype=entry.torch_dtype)
    _fill_blocks([(name, found, [first, *[0] * (len(entry.shape) - 1)])], files, index)
    return found


def _fill_blocks(
    blocks: Iterable[tuple[str, Tensor, Sequence[int]]], files: Store, index: Index
) -> None:
    """Fill parts of tensors: the name of each, the part itself, and where it begins in the whole.

    The files are read one after another, each from its beginning on.
    """
    parts = []
    for name, held, start in blocks:
        for chunk in index.tensors[name].chunks:
            boxes = zip(chunk.offsets, chunk.sizes, start, held.shape, strict=True)
            shared = [(max(a, b), min(a + n, b + m)) for a, n, b, m in boxes]
            if all(first < stop for first, stop in shared):
                parts.append((chunk, name, shared, held[_slices(shared, start)]))
    for chunk, name, shared, target in sorted(parts, key=lambda p: (p[0].file, p[0].start)):
        target.copy_(_read(files, index, name, chunk, shared))


def _slices(bounds: Sequence[tuple[int, int]], start: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - at, b - at) for (a, b), at in zip(bounds, start, strict=True))


def _read(
    files: Store, index: Index, name: str, chunk: Chunk, wanted: Sequence[tuple[int, int]]
) -> Tensor:
    """Return the part of a chunk between bounds in the whole tensor; only its rows are read."""
    dtype, window = index.tensors[name].torch_dtype, _slices(wanted, chunk.offsets)
    row = math.prod(chunk.sizes[1:]) * dtype.itemsize  # bytes
    first, stop = (window[0].start, window[0].stop) if window else (0, 1)
    file = index.files[chunk.file]
    data = bytearray(files.read(file, chunk.start + first * row, chunk.start + stop * row))
    if len(data) != (stop - first) * row:
        raise ValidationError(f"{file} became shorter while it was read", where=files.root)
    tensor = torch.frombuffer(data, dtype=dtype)
    if not window:
        return tensor.reshape(())  # a scalar has no dimension
    return tensor.reshape(stop - first, *chunk.sizes[1:])[:, *window[1:]]
