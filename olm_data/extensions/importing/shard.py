"""One token file of another project becomes a shard in place: read once, sidecars written beside.

token file, Borders -> one pass: sha256, block checksums, ids in range, EOS at document ends,
                       content hash of each document's tokens
                    -> shard-0000n.ends.npy, .docs.parquet, and the commit record last
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from olm_data.dataset.docs import DOCS, DocsWriter, docs_schema
from olm_data.dataset.record import (
    BLOCK_BYTES,
    FileInfo,
    ImportedFile,
    ShardRecord,
)
from olm_data.dataset.shard import ENDS
from olm_data.dataset.shard_writer import TokensSummary, publish_shard
from olm_data.extensions.importing.borders import Borders
from olm_data.extensions.importing.dtypes import advice, defect, looks_like
from olm_data.extensions.importing.token_files import TokenFile, pieces, refuse
from olm_data.storage.store import Store


@dataclass(frozen=True)
class Content:
    """What one pass over a token file finds.

    Attributes:
        tokens: size, digests and largest id of the file.
        ended: documents whose last token is the EOS id.
        hashes: uint64 [documents], XXH3-64 of the bytes of each document's tokens.
    """

    tokens: TokensSummary
    ended: int
    hashes: np.ndarray


def scan_tokens(
    file: TokenFile,
    ends: np.ndarray,
    dtype: np.dtype[Any],
    *,
    vocab_size: int,
    eos: int | None,
    scanned: bool,
    on_read: Callable[[int], None],
) -> Content:
    """Read a token file once.

    Args:
        ends: uint64 [documents], where its documents end.
        vocab_size: every id must be below it.
        eos: id that should end each document, or None.
        scanned: no sidecar says where documents end, and so how wide a token is.
        on_read: called with the bytes of each piece.

    Raises:
        InputError: an id is outside the vocabulary, or the dtype is plainly another.
    """
    sha256, crc32, largest, ended, place = hashlib.sha256(), [], -1, 0, 0
    hashes = np.empty(len(ends), np.uint64)
    stops = (ends.astype(np.int64) * dtype.itemsize).tolist()
    number, rest = 0, xxhash.xxh3_64()
    for piece in pieces(file):
        on_read(len(piece))
        sha256.update(piece)
        view = memoryview(piece)
        crc32 += [
            f"{zlib.crc32(view[i : i + BLOCK_BYTES]):08x}" for i in range(0, len(view), BLOCK_BYTES)
        ]
        ids = np.frombuffer(piece, dtype)
        first = place // dtype.itemsize
        if wrong := defect(piece, dtype, vocab_size, first=first, width_known=not scanned):
            refuse(file, wrong, fix=advice(looks_like(piece, vocab_size)))
        largest = max(largest, int(ids.max()))
        first, start, stop = number, 0, place + len(piece)
        while number < len(stops) and stops[number] <= stop:
            rest.update(view[start : stops[number] - place])
            hashes[number] = rest.intdigest()
            rest.reset()
            start, number = stops[number] - place, number + 1
        rest.update(view[start:])
        if eos is not None:
            last = ends[first:number].astype(np.int64) - 1 - place // dtype.itemsize
            ended += int(np.count_nonzero(ids[last] == eos))
        place = stop
    info = FileInfo(file.bytes, sha256.hexdigest())
    tokens = TokensSummary(file=info, crc32="".join(crc32), largest=largest)
    return Content(tokens, ended, hashes)


def write_sidecars(
    store: Store,
    name: str,
    number: int,
    plan: str,
    borders: Borders,
    content: Content,
    not_ended: int,
) -> tuple[ShardRecord, str]:
    """Write the ends, document rows and commit record of a shard; return the record and its sha256.

    Args:
        store: of the dataset.
        name: of the shard.
        number: of the file among the inputs.
        plan: digest of the import.
        not_ended: documents whose last token is not the EOS id.
    """
    with store.staging() as staging:
        paths = {kind: staging / (name + kind) for kind in (ENDS, DOCS)}
        _write_docs(paths[DOCS], number, borders, content.hashes)
        record = publish_shard(
            store,
            name,
            paths,
            borders.ends.astype("<u8", copy=False),
            content.tokens,
            plan=plan,
            text_bytes=0,
            units=[ImportedFile(input=number, not_ended=not_ended)],
            dropped={"empty": borders.empty} if borders.empty else {},
        )
    return record, hashlib.sha256(record.encode()).hexdigest()


def _write_docs(path: Path, number: int, borders: Borders, hashes: np.ndarray) -> None:
    import pyarrow as pa

    count, columns = len(borders.ends), dict(borders.columns)
    ids = columns.pop("id", pa.nulls(count, pa.string()))
    schema = docs_schema(pa.schema([pa.field(n, c.type) for n, c in columns.items()]))
    table = pa.Table.from_arrays(
        [
            ids,
            pa.array(np.full(count, number, np.int32)),
            pa.array(borders.position.astype(np.int64)),
            pa.array(np.zeros(count, np.int64)),
            pa.array(hashes),
            *columns.values(),
        ],
        schema=schema,
    )
    with DocsWriter(path, schema) as writer:
        for rows in table.to_batches():
            writer.append(rows)
