"""A token file of another project, and where it says its documents end.

    find.py -> TokenFile each -> read_borders -> Borders
                                 .npy   dolma, OLMo-core     .csv.gz beside it, or an EOS scan
                                 .bin   Megatron             .idx beside it
                                 .ds    datatrove            .ds.index beside it

A sidecar is believed only if its documents tile the file exactly. Never: writes, unpickles, guesses
a dtype, or follows a path that a sidecar names.
"""

from __future__ import annotations

import gzip
import io
import posixpath
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from olm_data.errors import InputError, printable
from olm_data.importing.megatron import IndexDefect, read_index
from olm_data.regular_files import MAX_SMALL, MAX_WHOLE
from olm_data.sources.limits import MAX_RATIO
from olm_data.storage.store import Store

_FREE_BYTES = 16 << 20  # that a .csv.gz may unpack to, whatever its size
KINDS = {".npy": "olmo-core", ".bin": "megatron", ".ds": "datatrove"}
"""Suffix of a token file -> whose format it is."""
SIDECARS = {".npy": (".csv.gz",), ".bin": (".idx",), ".ds": (".ds.index", ".ds.metadata")}
"""Suffix of a token file -> what the files that describe it end in instead."""
NUMPY_MAGIC = b"\x93NUMPY"

PIECE_BYTES = 4 << 20  # a multiple of the block size


@dataclass(frozen=True)
class TokenFile:
    """One file of tokens.

    Attributes:
        store: its folder.
        name: its name there.
        kind: whose format it is, a value of `KINDS`.
        bytes: its size.
    """

    store: Store
    name: str
    kind: str
    bytes: int

    @property
    def url(self) -> str:
        """Its path or URL."""
        return self.store.url(self.name)

    def beside(self, suffix: str) -> str:
        """Return the name of the file beside it that ends in `suffix` instead."""
        return posixpath.splitext(self.name)[0] + suffix


@dataclass(frozen=True)
class Borders:
    """Where the documents of a token file end, and what its sidecar says of them.

    Attributes:
        ends: uint64 [documents], cumulative, without empty documents.
        position: int64 [documents], number of each document in the sidecar.
        columns: `id`, `src`, `loc` of each document, as far as the sidecar has them; Arrow arrays.
        empty: documents without a token, which are left out.
        scanned: the file has no sidecar: documents end at EOS ids.
        notes: what the reader should know.
    """

    ends: np.ndarray
    position: np.ndarray
    columns: dict[str, Any] = field(default_factory=dict)
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
    notes = [f"{printable(file.name)}: no .csv.gz; {len(ends):,} documents found by EOS id {eos}"]
    if rest:
        ends = np.append(ends, np.uint64(place))
        notes.append(f"{printable(file.name)}: {rest:,} tokens after the last EOS id are one more")
    return Borders(ends, np.arange(len(ends)), scanned=True, notes=tuple(notes))


def sidecar_bytes(file: TokenFile) -> int:
    """Return how large an index beside a token file may be: a document has a token and 20 bytes."""
    return max(MAX_WHOLE, 20 * file.bytes)


def pieces(file: TokenFile) -> Iterator[bytes]:
    """Yield the bytes of a file, a multiple of the block size at a time."""
    return file.store.pieces(file.name, PIECE_BYTES)


def _olmo_core(file: TokenFile, sidecar: str, dtype: np.dtype[Any]) -> Borders:
    """Read `start,end,id,src,loc`, or only the first two of them."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv

    try:
        stored = file.store.read(sidecar, limit=sidecar_bytes(file))
        limit = max(_FREE_BYTES, MAX_RATIO * len(stored))
        data = gzip.GzipFile(fileobj=io.BytesIO(stored)).read(limit + 1)
        if len(data) > limit:
            refuse(file, f"its {posixpath.basename(sidecar)} unpacks to {MAX_RATIO} times its size")
    except (OSError, EOFError, zlib.error) as error:
        refuse(file, f"its {posixpath.basename(sidecar)} is not a gzip file: {error}")
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
                | {name: pa.string() for name in names[2:]},
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
    try:
        data = file.store.read(name, limit=sidecar_bytes(file))
    except FileNotFoundError:
        refuse(file, f"there is no {posixpath.basename(name)} beside it")
    if len(data) % 8:
        refuse(file, f"{posixpath.basename(name)} has {len(data):,} bytes, not 8 a document")
    ends = np.frombuffer(data, "<u8")
    if len(ends) and int(ends.max()) > file.bytes:
        refuse(file, f"{posixpath.basename(name)} leads beyond its end")
    notes: tuple[str, ...] = ()
    if "_chunk_shuffled" in file.name:
        notes = (
            f"{printable(file.name)}: its chunks were shuffled, so that its index holds the ends "
            "of chunks, too: some documents here are parts of documents",
        )
    return _tiled(file, dtype, ends.astype(np.int64), {}, notes)


def _megatron(file: TokenFile, dtype: np.dtype[Any]) -> Borders:
    name = file.beside(".idx")
    try:
        data = file.store.read(name, limit=sidecar_bytes(file))
        ends = read_index(data, dtype, file.bytes)
    except FileNotFoundError:
        refuse(file, f"there is no {posixpath.basename(name)} beside it")
    except IndexDefect as error:
        refuse(file, f"{posixpath.basename(name)}: {error}")
    return _tiled(file, dtype, ends, {})


def _tiled(
    file: TokenFile,
    dtype: np.dtype[Any],
    ends: np.ndarray,
    columns: dict[str, Any],
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


def refuse(file: TokenFile, what: str, fix: str = "restore the file, or leave it out") -> NoReturn:
    """Raise that a file is refused."""
    raise InputError(printable(what), where=printable(file.url), fix=fix)
