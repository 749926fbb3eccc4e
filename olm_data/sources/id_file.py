"""A file of ids, one a line: the documents to leave out (`--exclude-ids`), or to keep in a view."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from olm_data.dataset.inputs import InputFile
from olm_data.errors import InputError, UsageError
from olm_data.select.selection import IdSet, document_digests
from olm_data.sources.buffers import joined
from olm_data.sources.line_blocks import stream_blocks
from olm_data.sources.listing import list_files


def read_ids(argument: str) -> IdSet:
    """Return the ids of a file, or of the files of a folder, one a line.

    White space around them and blank lines are left out.

    Args:
        argument: a text file, local or on S3, may be compressed.

    Raises:
        InputError: there is no such file, it holds no id, or is not UTF-8.
        StorageError: remote storage fails.
    """
    files = list_files([argument]).files
    if any(file.format != "txt" for file in files):
        raise UsageError(
            "the ids must be in text files, one per line",
            where=f"--exclude-ids {argument}",
            fix="name a .txt, .txt.gz or .txt.zst file, or a folder of such files",
        )
    ids = IdSet.of(chain.from_iterable(map(_digests, files)))
    if not len(ids):
        raise InputError("the file holds no id", where=f"--exclude-ids {argument}")
    return ids


def _digests(input: InputFile) -> Iterator[bytes]:
    """Yield the digests of a file's ids, some at a time."""
    for block, first in stream_blocks(input):
        try:
            block.decode()
        except UnicodeDecodeError as error:
            number = first + block.count(b"\n", 0, error.start) + 1
            raise InputError(
                "the file of ids is not valid UTF-8", where=f"{input.path}, line {number}"
            ) from error
        ids = [line for line in map(bytes.strip, block.split(b"\n")) if line]
        yield document_digests(*joined(ids))
