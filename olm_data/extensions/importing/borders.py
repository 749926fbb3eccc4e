"""Where the documents of another project's token file end.

    TokenFile -> read_borders -> Borders
                 .npy   dolma, OLMo-core     .csv.gz beside it, or an EOS scan
                 .bin   Megatron             .idx beside it
                 .ds    datatrove            .ds.index beside it

A sidecar is believed only if its documents tile the file exactly. Never: writes, unpickles, guesses
a dtype, or follows a path that a sidecar names.
"""

from __future__ import annotations

import io
import posixpath
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from olm_data.counts import counted
from olm_data.decompress import DecompressionError, unpacked
from olm_data.errors import printable
from olm_data.extensions.importing.token_files import (
    NUMPY_MAGIC,
    PIECE_BYTES,
    TokenFile,
    pieces,
    refuse,
)
from olm_data.parquet import MAX_RATIO
from olm_data.regular_files import MAX_SMALL, MAX_WHOLE

if TYPE_CHECKING:
    import pyarrow as pa

_FREE_BYTES = 16 << 20  # that a .csv.gz may unpack to, whatever its size


@dataclass(frozen=True)
class Borders:
    """Where the documents of a token file end, and what its sidecar says of them.

    Attributes:
        ends: uint64 [documents], cumulative, without empty documents.
        position: int64 [documents], number of each document in the sidecar.
        columns: `id`, `src`, `loc` of each document, as far as the sidecar has them.
        empty: documents without a token, which are left out.
        scanned: the file has no sidecar: documents end at EOS ids.
        notes: what the reader should know.
    """

    ends: np.ndarray
    position: np.ndarray
    columns: dict[str, pa.Array] = field(default_factory=dict)
    empty: int = 0
    scanned: bool = False
    notes: tuple[str, ...] = ()


def read_borders(file: TokenFile, dtype: np.dtype[Any], eos: int | None) -> Borders:
    """Return where the documents of a file end.

    Args:
        dtype: of its tokens.
        eos: id that ends a document, for files without a sidecar.

    Raises:
        InputError: the sidecar is missing, damaged, or does not tile the file.
    """
    if file.bytes % dtype.itemsize:
        refuse(file, f"its {file.bytes:,} bytes are not a whole number of {dtype.name} tokens")
    if file.kind == "megatron":
        return _megatron(file, dtype)
    if file.kind == "datatrove":
        return _datatrove(file, dtype)
    if file.store.read(file.name, 0, len(NUMPY_MAGIC)) == NUMPY_MAGIC:
        refuse(
            file,
            "this file has a NumPy header, so dolma did not write it",
            fix="write its tokens without header: numpy.load(FILE).tofile(NEW)",
        )
    sidecar = file.beside(".csv.gz")
    if file.store.exists(sidecar):
        return _olmo_core(file, sidecar, dtype)
    if eos is None:
        refuse(
            file,
            f"there is no {posixpath.basename(sidecar)} beside it, and no EOS id to look for",
            fix="say which token ends a document: --eos TOKEN",
        )
    return scan(file, dtype, eos)


def tokenizer_of(file: TokenFile) -> tuple[str, np.dtype[Any]] | None:
    """Return (tokenizer, dtype) that the `.metadata` of a datatrove file names, if there is one."""
    try:
        head = file.store.read(file.name + ".metadata", limit=MAX_SMALL).decode().splitlines()[0]
        name, _, size = head.rpartition("|")
        return name, np.dtype({"2": "uint16", "4": "uint32"}[size])
    except (FileNotFoundError, UnicodeDecodeError, IndexError, KeyError):
        return None


def scan(file: TokenFile, dtype: np.dtype[Any], eos: int) -> Borders:
    """Return borders after each EOS id; what follows the last one is a document, too."""
    parts, place = [], 0
    for piece in pieces(file):
        ids = np.frombuffer(piece, dtype)
        parts.append(np.flatnonzero(ids == eos).astype(np.uint64) + np.uint64(place + 1))
        place += len(ids)
    ends = np.concatenate(parts) if parts else np.zeros(0, np.uint64)
    rest = place - (int(ends[-1]) if len(ends) else 0)
    notes = [
        f"{printable(file.name)}: no .csv.gz; "
        f"{counted(len(ends), 'document')} found by EOS id {eos}"
    ]
    if rest:
        ends = np.append(ends, np.uint64(place))
        notes.append(f"{printable(file.name)}: {rest:,} tokens after the last EOS id are one more")
    return Borders(ends, np.arange(len(ends)), scanned=True, notes=tuple(notes))


def _sidecar(file: TokenFile, name: str) -> bytes:
    """Return what lies beside a token file; a document has a token, and at most 20 bytes there."""
    try:
        return file.store.read(name, limit=max(MAX_WHOLE, 20 * file.bytes))
    except FileNotFoundError:
        refuse(file, f"there is no {posixpath.basename(name)} beside it")


def _olmo_core(file: TokenFile, sidecar: str, dtype: np.dtype[Any]) -> Borders:
    """Read `start,end,id,src,loc`, or only the first two of them."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv

    try:
        stored = _sidecar(file, sidecar)
        data = unpacked(stored, "gzip", max(_FREE_BYTES, MAX_RATIO * len(stored)))
    except (OSError, DecompressionError) as error:
        refuse(file, f"its {posixpath.basename(sidecar)} is not a gzip file that is read: {error}")
    names = ["start", "end", "id", "src", "loc"]
    if not data:
        return _tiled(file, dtype, np.zeros(0, np.int64), {})
    try:
        table = csv.read_csv(
            io.BytesIO(data),
            csv.ReadOptions(column_names=names[: _width(data)]),
            csv.ParseOptions(newlines_in_values=True),
            csv.ConvertOptions(
                column_types={"start": pa.int64(), "end": pa.int64()}
                | {name: pa.string() for name in names[2:]}
            ),
        )
    except pa.ArrowInvalid as error:
        refuse(file, f"its {posixpath.basename(sidecar)} is malformed: {error}")
    for name in names[:2]:
        if table[name].null_count:
            refuse(file, f"its {posixpath.basename(sidecar)} has a row without a number as {name}")
    start, end = (table[name].to_numpy() for name in names[:2])
    before = np.append(0, end[:-1])
    wrong = np.flatnonzero((start != before) | (end < start))
    if len(wrong):
        row = int(wrong[0])
        refuse(
            file,
            f"the documents of {posixpath.basename(sidecar)} do not tile it: row {row + 1} is "
            f"[{start[row]:,}, {end[row]:,}) after {before[row]:,}",
        )
    columns = {name: table[name].combine_chunks() for name in table.column_names[2:]}
    if "loc" in columns and bool(pc.all(pc.match_substring_regex(columns["loc"], r"^\d{1,18}$"))):
        columns["loc"] = columns["loc"].cast(pa.int64())
    return _tiled(file, dtype, end, columns)


def _width(data: bytes) -> int:
    """Return how many columns the first row of a CSV file has: 5 or 2."""
    line = data.split(b"\n", 1)[0]
    return 5 if line.count(b",") >= 4 else 2


def _datatrove(file: TokenFile, dtype: np.dtype[Any]) -> Borders:
    name = file.name + ".index"
    data = _sidecar(file, name)
    if len(data) % 8:
        refuse(file, f"{posixpath.basename(name)} has {len(data):,} bytes, not 8 a document")
    ends = np.frombuffer(data, "<u8")
    if len(ends) and int(ends.max()) > file.bytes:
        refuse(file, f"{posixpath.basename(name)} leads beyond its end")
    notes: tuple[str, ...] = ()
    if masked := _masked(file):
        notes += (
            f"{printable(file.name)}: {masked:,} tokens have no loss by the mask "
            f"{posixpath.basename(file.name)}.loss, which a dataset does not hold: they are "
            "trained on as the others are",
        )
    if "_chunk_shuffled" in file.name:
        notes += (
            f"{printable(file.name)}: its chunks were shuffled, so that its index holds the ends "
            "of chunks, too: some documents here are parts of documents",
        )
    return _tiled(file, dtype, ends.astype(np.int64), {}, notes)


def _masked(file: TokenFile) -> int:
    """Return how many tokens the mask beside a datatrove file, a byte a token, leaves out."""
    try:
        mask = file.store.pieces(file.name + ".loss", PIECE_BYTES)
        return sum(len(piece) - int(np.count_nonzero(np.frombuffer(piece, "u1"))) for piece in mask)
    except FileNotFoundError:
        return 0


def _megatron(file: TokenFile, dtype: np.dtype[Any]) -> Borders:
    name = file.beside(".idx")
    data = _sidecar(file, name)
    try:
        ends = read_index(data, dtype, file.bytes)
    except IndexDefect as error:
        refuse(file, f"{posixpath.basename(name)}: {error}")
    notes: tuple[str, ...] = ()
    if has_modes(data):
        notes = (f"{printable(file.name)}: the modes of its sequences are not read: all are text",)
    return _tiled(file, dtype, ends, {}, notes)


def _tiled(
    file: TokenFile,
    dtype: np.dtype[Any],
    ends: np.ndarray,
    columns: dict[str, pa.Array],
    notes: tuple[str, ...] = (),
) -> Borders:
    """Check that documents tile the file, and leave empty ones out."""
    tokens = file.bytes // dtype.itemsize
    lengths = np.diff(ends, prepend=np.int64(0))
    falls = np.flatnonzero(lengths < 0)
    if len(falls):
        refuse(file, f"document {int(falls[0])} ends before it begins")
    last = int(ends[-1]) if len(ends) else 0
    if last != tokens:
        refuse(
            file,
            f"its documents end at token {last:,}, and as {dtype.name} it has {tokens:,}",
            fix="say the right --dtype, or make its sidecar again",
        )
    full = np.flatnonzero(lengths)
    if len(full) < len(ends):
        columns = {name: column.take(full) for name, column in columns.items()}
    return Borders(
        ends[full].astype(np.uint64), full, columns, empty=len(ends) - len(full), notes=notes
    )


MAGIC = b"MMIDIDX\0\0"
HEAD = struct.Struct("<9sQBQQ")
CODES: dict[int, np.dtype[Any]] = {4: np.dtype(np.uint32), 8: np.dtype(np.uint16)}
"""dtype code -> how its ids are read. Ids are never negative: int32 (4) has the bits of uint32."""


class IndexDefect(ValueError):
    """An index that is not what it should be; the message says how."""


def index_dtype(data: bytes) -> np.dtype[Any]:
    """Return the dtype of the tokens that an index is of.

    Args:
        data: at least its first 34 bytes.

    Raises:
        IndexDefect: it is no index of version 1, or of values that are no token ids.
    """
    if len(data) < HEAD.size or data[:9] != MAGIC:
        raise IndexDefect("this is not a Megatron index")
    _, version, code, _, _ = HEAD.unpack_from(data)
    if version != 1:
        raise IndexDefect(f"this is version {version} of the format, not 1")
    if code not in CODES:
        raise IndexDefect(f"dtype code {code} is none of token ids: {sorted(CODES)}")
    return CODES[code]


def has_modes(data: bytes) -> bool:
    """Whether a whole index, as `read_index` takes it, says a mode above 0 of some sequence."""
    return any(data[_size(data) :])


def _size(data: bytes) -> int:
    """Return how many bytes an index has, without modes."""
    _, _, _, sequences, entries = HEAD.unpack_from(data)
    return HEAD.size + 12 * int(sequences) + 8 * int(entries)


def read_index(data: bytes, dtype: np.dtype[Any], size: int) -> np.ndarray:
    r"""Return the ends of the documents in tokens, cumulative, as int64 [documents].

    Layout of `megatron.core.datasets.indexed_dataset`, little-endian and not aligned:

        offset 0       "MMIDIDX\0\0", u64 version 1, u8 dtype code, u64 sequences S, u64 D
        offset 34      i32 [S] tokens of each sequence, i64 [S] its first byte in .bin,
                       i64 [D] first sequence of each document and S, (u8 [S] modes)

    Args:
        dtype: of the tokens, as `index_dtype` says.
        size: bytes of the `.bin`.

    Raises:
        IndexDefect: sequences or documents do not tile the file, or the index is of another size.
    """
    assert index_dtype(data) == dtype
    _, _, _, sequences, entries = HEAD.unpack_from(data)
    expected = _size(data)
    if len(data) not in (expected, expected + sequences):
        raise IndexDefect(f"it has {len(data):,} bytes, not {expected:,}")
    lengths = np.frombuffer(data, "<i4", sequences, HEAD.size).astype(np.int64)
    starts = np.frombuffer(data, "<i8", sequences, HEAD.size + 4 * sequences)
    first = np.frombuffer(data, "<i8", entries, HEAD.size + 12 * sequences)
    ends = np.cumsum(lengths)
    if (lengths < 0).any() or not np.array_equal(starts, (ends - lengths) * dtype.itemsize):
        raise IndexDefect("its sequences do not follow each other without a gap")
    total = int(ends[-1]) if sequences else 0
    if total * dtype.itemsize != size:
        raise IndexDefect(f"its sequences have {total * dtype.itemsize:,} bytes, .bin {size:,}")
    if not entries or first[0] != 0 or first[-1] != sequences or (np.diff(first) < 0).any():
        raise IndexDefect("its documents do not tile its sequences")
    result: np.ndarray = np.append(0, ends)[first[1:]]
    return result
