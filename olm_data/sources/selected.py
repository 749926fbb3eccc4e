"""A user's selection among documents: batches in, batches with the chosen documents out.

    DocumentBatch -> --exclude-ids -> --sample -> DocumentBatch, the rest counted as skipped
    a file of ids -> IdSet

`where` is not here: the readers apply it, before they read the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np

from olm_data.dataset.inputs import ReadOptions
from olm_data.errors import InputError, UsageError, printable
from olm_data.select.digests import content_hashes, document_digests
from olm_data.select.selection import IdSet, drawn
from olm_data.sources.base import DocumentBatch
from olm_data.sources.buffers import choose
from olm_data.sources.files import open_stream
from olm_data.sources.listing import list_files

_CHUNK = 4 << 20
_BOM = b"\xef\xbb\xbf"


def chosen(batch: DocumentBatch, options: ReadOptions, excluded: IdSet | None) -> DocumentBatch:
    """Return the batch with the documents that the options take.

    Args:
        excluded: the ids to leave out; `options.exclude` is its digest.
    """
    assert (excluded is None) == (options.exclude is None)
    if excluded is not None and batch.documents and batch.ids is not None:
        batch = choose(batch, ~excluded.find(batch.ids), "excluded")
    if options.sample is not None and batch.documents:
        hashes = content_hashes(document_digests(batch.data, batch.offsets))
        taken = drawn(hashes, Fraction(options.sample), options.seed)
        batch = choose(batch, taken, "unsampled")
    return batch


def read_ids(argument: str) -> IdSet:
    """Return the ids of a file, one a line; white space around them and blank lines are left out.

    Args:
        argument: a text file, local or on S3, may be compressed.

    Raises:
        InputError: there is no such file, it holds no id, or is not UTF-8.
        StorageError: remote storage fails.
    """
    files = list_files([argument]).files
    if len(files) != 1 or files[0].format != "txt":
        raise UsageError(
            "the ids must be in one text file, one per line",
            where=f"--exclude-ids {printable(argument)}",
            fix="name a .txt, .txt.gz or .txt.zst file",
        )
    with open_stream(files[0]) as stream:
        ids = IdSet.of(_digests(stream.read, files[0].path))
    if not len(ids):
        raise InputError("the file holds no id", where=f"--exclude-ids {printable(argument)}")
    return ids


def _digests(read: Callable[[int], bytes], where: str) -> Iterator[bytes]:
    """Yield the digests of the ids of a stream, some at a time."""
    pending, lines = b"", 0
    while True:
        chunk = read(_CHUNK)
        if not lines and not pending:
            chunk = chunk.removeprefix(_BOM)
        block, cut, pending = (pending + chunk).rpartition(b"\n") if chunk else (pending, b"", b"")
        try:
            block.decode()
        except UnicodeDecodeError as error:
            number = lines + block.count(b"\n", 0, error.start) + 1
            raise InputError(
                "the file of ids is not valid UTF-8", where=f"{where}, line {number}"
            ) from error
        lines += block.count(b"\n") + len(cut)
        ids = [line for line in map(bytes.strip, block.split(b"\n")) if line]
        offsets = np.cumsum([0, *map(len, ids)])
        yield document_digests(np.frombuffer(b"".join(ids), np.uint8), offsets)
        if not chunk:
            return
