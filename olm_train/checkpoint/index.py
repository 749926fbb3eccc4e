"""`model_and_optim/index.json`: where the bytes of each tensor lie, and what is no tensor.

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
import re
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import torch

from olm_data.bounded_json import JsonObject, check
from olm_data.decoding import decode_typed
from olm_data.errors import ValidationError
from olm_data.regular_files import refuse_unreadable

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
