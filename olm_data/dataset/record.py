"""The commit record of a shard, `shard-00000.json`: there if and only if the rest is complete.

    ShardRecord.encode -> bytes -> ShardRecord.decode, checked against the manifest's digest

Read by whoever must know what a shard holds without opening it: reruns, manifests, verification.
Specified in docs/reference/format.md.

Also: how many documents can begin in a window of so many tokens: bounds for batches of a fixed
shape.

Also: how the tokens of a shard lie in a file: with a NumPy header (`npy`) or as they are (`raw`).
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from olm_data.bounded_json import MalformedJson, Size, decode
from olm_data.dataset.account import InputAccount
from olm_data.dataset.inputs import Container
from olm_data.decoding import decode_typed
from olm_data.errors import ValidationError, printable
from olm_data.storage.disk import io_errors
from olm_data.storage.store import Store, read_json

T = TypeVar("T")

CONTAINERS: tuple[Container, ...] = ("npy", "raw")
HEADER_BYTES = 128  # NumPy pads every 1-D version 1.0 header to this
TOKENS, RAW_TOKENS = ".tokens.npy", ".tokens.bin"


def tokens_suffix(container: Container) -> str:
    """Return what follows a shard's name in the name of its token file."""
    return RAW_TOKENS if container == "raw" else TOKENS


def tokens_header(container: Container) -> int:
    """Return how many bytes stand before the first token."""
    return 0 if container == "raw" else HEADER_BYTES


def file_header(container: Container, dtype: np.dtype[Any], count: int) -> bytes:
    """Return the bytes that stand before `count` tokens."""
    return b"" if container == "raw" else npy_header(dtype, count)


def npy_header(dtype: np.dtype[Any], count: int) -> bytes:
    """Return the 128-byte NumPy version 1.0 header of a 1-D little-endian array."""
    buffer = io.BytesIO()
    descr = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(buffer, descr)
    header = buffer.getvalue()
    assert len(header) == HEADER_BYTES
    return header


def mapped_bytes(store: Store, name: str) -> np.ndarray:
    """Return the bytes of a local file, uint8 [bytes], as a read-only memory map."""
    with io_errors(store.url(name)), store.open(name) as file:
        return np.memmap(file, np.uint8, "r").view(np.ndarray)


WINDOWS = tuple(1 << k for k in range(6, 21))
WIDTHS = {str(width) for width in WINDOWS}
Counts = tuple[Size, Size, Size]
"""Most document starts in a window of a shard, in its first window, in its last."""


def window_counts(ends: np.ndarray) -> dict[str, Counts]:
    """Count document starts in windows of 64, 128, ... tokens of one shard.

    Args:
        ends: uint64 [documents], cumulative document ends in tokens.

    Returns:
        width -> [most starts in any window, starts in the first, in the last `width` tokens], up to
        the first width that covers the shard.
    """
    if not len(ends):
        return {}
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    tokens, rank = int(ends[-1]), np.arange(len(starts))
    counts = {}
    for width in WINDOWS:
        most = int((np.searchsorted(starts, starts + width) - rank).max())
        first = int(np.searchsorted(starts, width))
        last = len(starts) - int(np.searchsorted(starts, tokens - width))
        counts[str(width)] = (most, first, last)
        if width >= tokens:
            break
    return counts


def stream_windows(shards: Sequence[tuple[int, int, Mapping[str, Counts]]]) -> dict[str, int]:
    """Bound document starts in any window of a dataset's tokens.

    Args:
        shards: (tokens, documents, `window_counts`) of each shard, in order.

    Returns:
        width -> most starts, up to the first width that covers the dataset.
    """
    if not shards:
        return {}
    tokens = np.array([tokens for tokens, _, _ in shards], np.int64)
    documents = np.array([documents for _, documents, _ in shards], np.int64)
    token_ends, document_ends = np.cumsum(tokens), np.cumsum(documents)
    bounds: dict[str, int] = {}
    for width in WINDOWS:
        # a shard shorter than the window has no entry for it: all its documents may be inside
        inside, first, last = (
            np.array([w.get(str(width), (d, d, d))[i] for _, d, w in shards], np.int64)
            for i in range(3)
        )
        # a window that starts in shard i ends at the latest in shard j, with all between inside it
        index = np.arange(len(shards))
        j = np.minimum(np.searchsorted(token_ends, token_ends + width - 1), len(shards) - 1)
        across = last + (document_ends[j] - documents[j] - document_ends) + first[j]
        bounds[str(width)] = int(max(inside.max(), np.where(j > index, across, 0).max()))
        if width >= token_ends[-1]:
            break
    return bounds


def documents_bound(bounds: Mapping[str, int], width: int) -> int:
    """Return a bound on the documents that a window of `width` tokens can touch.

    Args:
        bounds: of the dataset, from `stream_windows`.
    """
    exact = [w for w in map(int, bounds) if w >= width]
    if exact:
        starts = bounds[str(min(exact))]
    elif bounds:
        widest = max(map(int, bounds))
        starts = -(-width // widest) * bounds[str(widest)]
    else:
        starts = width
    return min(width, starts + 1)


RECORD = ".json"
BLOCK_BYTES = 1 << 16
_HEX = re.compile(r"[0-9a-f]*+")


class FileInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size in bytes and sha256 of one file."""

    bytes: Size
    sha256: str


class Blocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """zlib.crc32 of each `bytes`-sized block of the tokens file, 8 hex digits a block."""

    bytes: Size
    crc32: str

    def crc(self, block: int) -> int:
        """Return the checksum of block `block`."""
        return int(self.crc32[block * 8 : block * 8 + 8], 16)


class ImportedFile(msgspec.Struct, frozen=True, kw_only=True):
    """The unit of an imported shard: its input, and how many documents lack the EOS id."""

    input: Size
    not_ended: Size = 0


def encode_units(units: Sequence[InputAccount | ImportedFile]) -> msgspec.Raw:
    """Return the units of a task, all of one kind, as a record holds them."""
    return msgspec.Raw(msgspec.json.encode(units, order="sorted"))


class ShardRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The commit record of a shard.

    `runs` and `trained` only where the shard says which tokens are trained: entries of its labels
    file, and how many tokens these are.
    """

    version: int
    name: str
    plan: str
    tokens: Size
    documents: Size
    text_bytes: Size
    max_token_id: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 32)]  # -1 where there is no token
    files: dict[str, FileInfo]
    blocks: Blocks
    # of each input an `InputAccount`, or of an imported file an `ImportedFile`; see `encode_units`
    units: msgspec.Raw
    dropped: dict[str, Size]
    windows: dict[str, Counts]
    runs: Size | msgspec.UnsetType = msgspec.UNSET
    trained: Size | msgspec.UnsetType = msgspec.UNSET

    @property
    def accounts(self) -> list[InputAccount]:
        """What became of the records of each input of the task, in input order.

        Raises:
            MalformedJson: the record has none; that of a validation split is empty.
        """
        return _decoded(self.units, list[InputAccount])

    @property
    def not_ended(self) -> int:
        """Of imported token files, the documents whose last token is not the EOS id."""
        return sum(unit.not_ended for unit in _decoded(self.units, list[ImportedFile]))

    def encode(self) -> bytes:
        """Return the record's bytes as stored."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1) + b"\n"

    @classmethod
    def parse(cls, data: bytes) -> ShardRecord:
        """Return the record in these bytes, whatever shard it is of.

        Raises:
            MalformedJson: there is none.
        """
        record = decode(data, cls)
        if record.windows.keys() - WIDTHS:
            raise MalformedJson("windows that are never counted")
        _decoded(record.units, list[ImportedFile])  # what all units have
        units = msgspec.Raw(msgspec.json.format(record.units, indent=-1))
        return msgspec.structs.replace(record, units=units)

    @classmethod
    def decode(cls, data: bytes, url: str, *, sha256: str, token_bytes: int) -> ShardRecord:
        """Return the record that was read from `url`.

        Args:
            sha256: its digest, from the manifest.
            token_bytes: size of the tokens file.

        Raises:
            ValidationError: it is another one, or malformed.
        """
        if hashlib.sha256(data).hexdigest() != sha256:
            raise damaged(url, "the commit record does not match its digest in the manifest")
        try:
            record = cls.parse(data)
        except MalformedJson as error:
            raise damaged(url, f"the commit record is malformed: {error}") from error
        blocks = record.blocks
        digits = 8 * -(-token_bytes // max(blocks.bytes, 1))
        if blocks.bytes < 1 or len(blocks.crc32) != digits or not _HEX.fullmatch(blocks.crc32):
            raise damaged(url, "the commit record has no checksum for each block")
        return record


def _decoded(units: msgspec.Raw, kind: type[T]) -> T:
    """Return the units of a task; accounts read as imported files are files that all end."""
    try:
        return decode_typed(units, kind)
    except msgspec.ValidationError as error:
        raise MalformedJson(printable(str(error))[:200]) from None


class _PlanOf(msgspec.Struct, frozen=True):
    """Of a commit record, only whose it is."""

    plan: str


def stored_plan(store: Store, name: str) -> str | None:
    """Return the plan of a shard's commit record, None where there is none that can be read."""
    try:
        return decode(read_json(store, name + RECORD), _PlanOf).plan
    except (FileNotFoundError, NotADirectoryError, MalformedJson):
        return None


def damaged(
    url: str,
    what: str,
    why: str = "training on it would feed the model other tokens than were written",
) -> ValidationError:
    """Return the error for a file of a shard that is not as it was written."""
    return ValidationError(
        what,
        where=url,
        why=why,
        fix="restore the file from a copy, or tokenise its inputs again into a new output",
    )
