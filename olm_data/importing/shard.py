"""One token file of another project becomes a shard in place: read once, sidecars written beside.

    token file, Borders -> one pass: sha256, block checksums, ids in range, EOS at document ends,
                           content hash of each document's tokens
                        -> shard-0000n.ends.npy, .docs.parquet, and the commit record last

Never: writes or copies a token.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from olm_data.dataset.container import npy_header
from olm_data.dataset.docs import DOCS, DocsWriter, docs_schema
from olm_data.dataset.record import (
    BLOCK_BYTES,
    RECORD,
    Blocks,
    FileInfo,
    ShardRecord,
    window_counts,
)
from olm_data.dataset.shard import ENDS
from olm_data.importing.files import Borders, TokenFile, pieces, refuse
from olm_data.storage.disk import write_durable
from olm_data.storage.store import Store

NOT_ENDED = "not_ended"
"""Key of a shard's units: documents whose last token is not the EOS id."""


@dataclass(frozen=True)
class Seen:
    """What one pass over a token file tells.

    Attributes:
        sha256, crc32: of the file, and of each of its blocks as 8 hexadecimal digits.
        largest: the largest id.
        ended: documents whose last token is the EOS id.
        hashes: uint64 [documents], XXH3-64 of the bytes of each document's tokens.
    """

    sha256: str
    crc32: str
    largest: int
    ended: int
    hashes: np.ndarray


def look(
    file: TokenFile,
    ends: np.ndarray,
    dtype: np.dtype[Any],
    *,
    vocab_size: int,
    eos: int | None,
    seen: Callable[[int], None],
) -> Seen:
    """Read a token file once.

    Args:
        ends: uint64 [documents], where its documents end.
        vocab_size: every id must be below it.
        eos: id that should end each document, or None.
        seen: called with the bytes of each piece.

    Raises:
        InputError: an id is outside the vocabulary, or the dtype is plainly another.
    """
    sha256, crc32, largest, ended, place = hashlib.sha256(), [], -1, 0, 0
    hashes = np.empty(len(ends), np.uint64)
    stops = (ends.astype(np.int64) * dtype.itemsize).tolist()
    number, rest = 0, xxhash.xxh3_64()
    for piece in pieces(file):
        seen(len(piece))
        sha256.update(piece)
        view = memoryview(piece)
        crc32 += [
            f"{zlib.crc32(view[i : i + BLOCK_BYTES]):08x}" for i in range(0, len(view), BLOCK_BYTES)
        ]
        ids = np.frombuffer(piece, dtype)
        _refuse_ids(file, ids, place // dtype.itemsize, vocab_size, dtype)
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
    return Seen(sha256.hexdigest(), "".join(crc32), largest, ended, hashes)


def _refuse_ids(
    file: TokenFile, ids: np.ndarray, first: int, vocab_size: int, dtype: np.dtype[Any]
) -> None:
    largest = int(ids.argmax())
    if int(ids[largest]) >= vocab_size:
        refuse(
            file,
            f"token {first + largest:,} is {int(ids[largest]):,}, and the tokenizer has "
            f"{vocab_size:,} entries",
            fix="say the right --dtype and the --tokenizer that made the file",
        )
    if dtype.itemsize == 2 and first == 0 and len(ids) >= 64 and not ids[1::2].any():
        refuse(
            file,
            "every second value is 0: these are uint32 tokens, not uint16",
            fix="--dtype uint32",
        )


def write_sidecars(
    store: Store,
    name: str,
    number: int,
    plan: str,
    file: TokenFile,
    borders: Borders,
    seen: Seen,
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
    ends = borders.ends
    with store.staging() as staging:
        paths = {ENDS: staging / (name + ENDS), DOCS: staging / (name + DOCS)}
        header = npy_header(np.dtype(np.uint64), len(ends))
        write_durable(paths[ENDS], header + ends.astype("<u8").tobytes())
        _write_docs(paths[DOCS], number, borders, seen.hashes)
        files = {"tokens": FileInfo(file.bytes, seen.sha256)}
        for kind, path in paths.items():
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            files[kind.split(".")[1]] = FileInfo(len(data), digest)
            store.publish(name + kind, path, digest)
    units = {"input": number, NOT_ENDED: not_ended}
    record = ShardRecord(
        version=1,
        name=name,
        plan=plan,
        tokens=int(ends[-1]),
        documents=len(ends),
        text_bytes=0,
        max_token_id=seen.largest,
        files=files,
        blocks=Blocks(BLOCK_BYTES, seen.crc32),
        units=[units],
        dropped={"empty": borders.empty} if borders.empty else {},
        windows=window_counts(ends),
    )
    encoded = record.encode()
    store.put(name + RECORD, encoded)
    return record, hashlib.sha256(encoded).hexdigest()


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
    with open(path, "rb") as written:
        os.fsync(written.fileno())
