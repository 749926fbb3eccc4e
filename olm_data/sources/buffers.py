"""From columns to batches: text as buffers, bad text found and counted, batches bounded by bytes.

    Arrow column | list of bytes  ->  null, invalid and empty texts out  ->  DocumentBatch, ...
    DocumentBatch, ... of small files  ->  merge  ->  fewer, larger ones

No Python string is made on this way, except for the few texts that begin with white space or a
character outside ASCII that may be white space.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from olm_data.arrow_values import as_mask, as_numpy, is_text
from olm_data.dataset.account import unaccounted
from olm_data.errors import InputError
from olm_data.sources.base import DocumentBatch, Drop, Scan

_DROP_BYTES = 200  # about what a drop takes in memory, without the record itself

# First bytes of UTF-8 characters that `str.isspace` may be true for.
_MAY_BE_SPACE = np.zeros(256, dtype=bool)
_MAY_BE_SPACE[[*range(0x09, 0x0E), *range(0x1C, 0x21), 0xC2, 0xE1, 0xE2, 0xE3]] = True


def from_column(
    scan: Scan,
    column: pa.Array,
    *,
    positions: np.ndarray,
    ids: pa.Array | None,
    keep: pa.RecordBatch | None,
    filtered: int,
) -> Iterator[DocumentBatch]:
    """Yield the documents of one text column, in order.

    Args:
        column: the text, of any string or binary type, nulls allowed; d values.
        positions, ids, keep: as in `DocumentBatch`, d rows.
        filtered: see `from_buffers`.

    Raises:
        InputError: the column holds something else than text.
    """
    text = _as_large_binary(column, scan.input.path)
    present = as_numpy(text.is_valid())
    drops = [scan.drop("no_text", int(p), "the text is null") for p in positions[~present]]
    rows_in = len(text) + filtered
    if drops:
        text, ids, keep = _filtered(present, text, ids, keep)
        positions = positions[present]
    yield from from_buffers(
        scan,
        *_buffers(text),
        positions=positions,
        ids=ids,
        keep=keep,
        dropped=drops,
        rows_in=rows_in,
        filtered=filtered,
    )


def from_buffers(
    scan: Scan,
    data: np.ndarray,
    offsets: np.ndarray,
    *,
    positions: np.ndarray,
    ids: pa.Array | None,
    keep: pa.RecordBatch | None,
    rows_in: int,
    dropped: Sequence[Drop] = (),
    filtered: int = 0,
    decoded: bool = False,
    replaced: int = 0,
) -> Iterator[DocumentBatch]:
    """Yield documents given as buffers, without those that are empty or not UTF-8.

    Args:
        data, offsets, positions, ids, keep, rows_in: as in `DocumentBatch`.
        dropped: records of this stretch already left out of `offsets`; they count in `rows_in`.
        filtered: records of this stretch that do not match `--where`; they count in `rows_in`.
        decoded: the text was made from strings, so it is UTF-8 for certain.
        replaced: records of this stretch in whose text U+FFFD was put already.

    Raises:
        ValidationError: the numbers of records do not add up.
    """
    bad = {} if decoded else _not_utf8(data, offsets)
    if bad and scan.options.on_invalid == "replace":
        data, offsets = _mended(data, offsets, bad)
        replaced, bad = replaced + len(bad), {}
    text = _large_binary(data, offsets)
    empty = _blank(data, offsets)
    empty[list(bad)] = False
    drops = list(dropped)
    if bad or empty.any():
        good = ~empty
        for k in np.flatnonzero(empty).tolist():
            drops.append(scan.drop("empty", int(positions[k])))
        for k, detail in bad.items():
            raw = data[offsets[k] : offsets[k + 1]].tobytes()
            drops.append(scan.drop("invalid_utf8", int(positions[k]), detail, raw))
            good[k] = False
        text, ids, keep = _filtered(good, text, ids, keep)
        positions = positions[good]
        data, offsets = _buffers(text)
    drops.sort(key=lambda drop: drop.position)
    documents = len(offsets) - 1
    if documents + len(drops) + filtered != rows_in:
        raise unaccounted(
            f"{rows_in:,} records read, but {documents:,} documents, {len(drops):,} drops and "
            f"{filtered:,} filtered",
            f"input {scan.index}",
        )
    first, size = 0, scan.options.batch_bytes
    while first < documents or drops or rows_in or filtered:
        stop = int(np.searchsorted(offsets, offsets[first] + size, side="right")) - 1
        stop = min(max(stop, first + 1), documents)
        part = slice(first, stop)
        # All drops of this stretch go with its first batch, and so do their rows.
        skipped = {(scan.index, "filtered"): filtered} if filtered else {}
        yield DocumentBatch(
            data=data[offsets[first] : offsets[stop]],
            offsets=offsets[first : stop + 1] - offsets[first],
            inputs=np.full(stop - first, scan.index, dtype=np.int32),
            positions=np.ascontiguousarray(positions[part]),
            ids=None if ids is None else ids[part],
            keep=None if keep is None else keep[part],
            dropped=tuple(drops),
            rows_in=stop - first + len(drops) + filtered,
            skipped=skipped,
            replaced={scan.index: replaced} if replaced else {},
        )
        replaced = 0
        first, drops, rows_in, filtered = stop, [], 0, 0


def joined(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return texts as buffers: uint8[n] and int64[d + 1]."""
    offsets = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), out=offsets[1:])
    return np.frombuffer(b"".join(texts), dtype=np.uint8), offsets


def choose(batch: DocumentBatch, chosen: np.ndarray, reason: str) -> DocumentBatch:
    """Return the batch with the chosen documents only; the others are counted as skipped.

    Args:
        chosen: bool[d].
        reason: a key of `SKIP_REASONS`.
    """
    skipped = Counter(batch.skipped)
    for index, count in zip(*np.unique(batch.inputs[~chosen], return_counts=True), strict=True):
        skipped[int(index), reason] += int(count)
    return replace(without(batch, ~chosen), skipped=skipped)


def without(batch: DocumentBatch, left_out: np.ndarray) -> DocumentBatch:
    """Return the batch without some documents (bool[d]), which whoever calls accounts for."""
    if not left_out.any():
        return batch
    chosen = ~left_out
    text, ids, keep = _filtered(
        chosen, _large_binary(batch.data, batch.offsets), batch.ids, batch.keep
    )
    data, offsets = _buffers(text)
    return replace(
        batch,
        data=data,
        offsets=offsets,
        inputs=batch.inputs[chosen],
        positions=batch.positions[chosen],
        ids=ids,
        keep=keep,
    )


def merge(batches: Iterable[DocumentBatch], batch_bytes: int) -> Iterator[DocumentBatch]:
    """Join consecutive batches while they fit in `batch_bytes` together; order is kept.

    A batch is not kept here while the consumer has it, as it may be one very long document.
    """
    waiting: list[DocumentBatch] = []
    size = 0
    for batch in batches:
        more = len(batch.data) + sum(_DROP_BYTES + len(drop.raw) for drop in batch.dropped)
        if waiting and size + more > batch_bytes:
            yield _as_one(waiting)
            size = 0
        waiting.append(batch)
        size += more
        del batch
    if waiting:
        yield _as_one(waiting)


def _as_large_binary(column: pa.Array, where: str) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_null(kind):
        return pa.nulls(len(column), pa.large_binary())
    if not is_text(kind):
        raise InputError(
            f"the text column is of type {kind}, not text", where=where, fix="see --text-column"
        )
    return column.cast(pa.large_binary())


def _buffers(text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return (uint8[n], int64[d + 1] from 0) of a large_binary array without nulls."""
    _, offsets_buffer, data_buffer = text.buffers()
    if len(text) == 0:
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    offsets = np.frombuffer(offsets_buffer, np.int64)[text.offset : text.offset + len(text) + 1]
    low, high = int(offsets[0]), int(offsets[-1])
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer else np.empty(0, np.uint8)
    return data[low:high], offsets - low if low else offsets


def _large_binary(data: np.ndarray, offsets: np.ndarray, kind: Any = None) -> pa.Array:
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets)), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind or pa.large_binary(), len(offsets) - 1, buffers)


def _filtered(
    mask: np.ndarray, text: pa.Array, ids: pa.Array | None, keep: pa.RecordBatch | None
) -> tuple[pa.Array, pa.Array | None, pa.RecordBatch | None]:
    chosen = as_mask(mask)
    return (
        pc.filter(text, chosen),
        None if ids is None else pc.filter(ids, chosen),
        None if keep is None else keep.filter(chosen),
    )


def _not_utf8(data: np.ndarray, offsets: np.ndarray) -> dict[int, str]:
    """Return the documents that are not UTF-8, each with the place of the first bad byte."""
    try:
        _large_binary(data, offsets, pa.large_string()).validate(full=True)
    except pa.ArrowInvalid:
        pass  # which ones, and where in them, is found one by one below
    else:
        return {}
    bad = {}
    for k in range(len(offsets) - 1):
        try:
            data[offsets[k] : offsets[k + 1]].tobytes().decode()
        except UnicodeDecodeError as error:
            bad[k] = f"byte {error.start} of the text: {error.reason}"
    return bad


def _mended(
    data: np.ndarray, offsets: np.ndarray, bad: Iterable[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the buffers with U+FFFD for what cannot be decoded in the bad documents."""
    texts = [data[a:b].tobytes() for a, b in pairwise(offsets.tolist())]
    for k in bad:
        texts[k] = texts[k].decode(errors="replace").encode()
    return joined(texts)


def _blank(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return bool[d]: the text is empty or white space only."""
    sizes = np.diff(offsets)
    blank: np.ndarray = sizes == 0
    some = np.flatnonzero(~blank)
    for k in some[_MAY_BE_SPACE[data[offsets[:-1][some]]]].tolist():
        text = data[offsets[k] : offsets[k + 1]].tobytes()
        # A first look at the beginning spares most texts the decoding.
        head = text[:64].decode(errors="ignore")
        blank[k] = (not head or head.isspace()) and text.decode(errors="replace").isspace()
    return blank


def _as_one(waiting: list[DocumentBatch]) -> DocumentBatch:
    """Return the batches as one, and empty the list."""
    batches = waiting.copy()
    waiting.clear()
    if len(batches) == 1:
        return batches[0]
    sizes = np.concatenate([batch.text_bytes for batch in batches])
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    ids = None
    if any(batch.ids is not None for batch in batches):
        ids = pa.concat_arrays(
            [
                pa.nulls(batch.documents, pa.string()) if batch.ids is None else batch.ids
                for batch in batches
            ]
        )
    keep = None
    schema = next((batch.keep.schema for batch in batches if batch.keep is not None), None)
    if schema is not None:
        tables = [_kept_or_nulls(batch, schema) for batch in batches]
        keep = pa.Table.from_batches(tables).combine_chunks().to_batches()
        keep = keep[0] if keep else tables[0]
    return DocumentBatch(
        data=np.concatenate([batch.data for batch in batches]),
        offsets=offsets,
        inputs=np.concatenate([batch.inputs for batch in batches]),
        positions=np.concatenate([batch.positions for batch in batches]),
        ids=ids,
        keep=keep,
        dropped=tuple(drop for batch in batches for drop in batch.dropped),
        rows_in=sum(batch.rows_in for batch in batches),
        skipped=sum((Counter(batch.skipped) for batch in batches), Counter()),
        replaced=sum((Counter(batch.replaced) for batch in batches), Counter()),
    )


def _kept_or_nulls(batch: DocumentBatch, schema: pa.Schema) -> pa.RecordBatch:
    if batch.keep is not None:
        return batch.keep
    return pa.RecordBatch.from_arrays(
        [pa.nulls(batch.documents, kind) for kind in schema.types], schema=schema
    )
