"""Files, local and remote: opening, decompressing; a damaged file or a lost connection?

    InputFile -> open_binary (seekable, as stored) | open_stream (decompressed, bounded memory)

Remote storage is read by the ETag that was listed (see `remote_files`), `hf://` by the commit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import IO, cast

import pyarrow as pa

from olm_data.dataset.inputs import InputFile
from olm_data.decompress import ByteStream, DecompressionError, decompressed
from olm_data.errors import InputError, OlmError, StorageError, said_by
from olm_data.sources import own, remote_files
from olm_data.sources.formats import codec_of
from olm_data.sources.limits import Bounded
from olm_data.storage.failures import is_connection
from olm_data.storage.hub import hub_filesystem, unreachable


def current_revision(input: InputFile) -> str:
    """Return what `input.revision` would be if the file were listed now ("" where it is gone)."""
    if input.format == "own":
        return own.current_revision(input)
    if input.format == "hub" or input.url.startswith("hf://"):
        return input.revision  # pinned to a commit
    if "://" not in input.url:
        try:
            return local_revision(input.url)
        except OSError:
            return ""
    return remote_files.current(input.url)


def open_binary(input: InputFile, *, ahead: bool = True) -> IO[bytes]:
    """Open an input as stored, seekable.

    Args:
        ahead: fetch more of a remote file than is asked for; False where the reader asks for exact
            ranges itself (parquet).

    Raises:
        InputError: it is gone or may not be read.
        StorageError: remote storage fails.
    """
    with reading(input):
        if "://" not in input.url:
            return open(input.url, "rb", buffering=0)
        if not input.url.startswith("hf://"):
            revision, path = input.revision, input.path
            remote = remote_files.RemoteFile(input.url, input.bytes, revision, path, ahead=ahead)
            return cast(IO[bytes], remote)
        cache = "readahead" if ahead else "none"
        file: IO[bytes] = hub_filesystem().open(
            input.url, "rb", block_size=8 << 20, cache_type=cache
        )
        return file


@contextlib.contextmanager
def open_stream(input: InputFile) -> Iterator[ByteStream]:
    """Open an input decompressed, to be read once from the start with `.read(n)`.

    gzip, zstd, xz and bzip2, several frames too; a frame that wants a window above 128 MiB is
    refused, and so is one that unpacks to more than text can (see `limits`).

    Raises:
        InputError: the file is truncated, damaged or no such file; names it and the byte.
        StorageError: remote storage fails.
    """
    codec = codec_of(input.url)
    with open_binary(input) as file:
        if codec is None:
            with reading(input, file):
                yield file
            return
        if input.bytes == 0:
            raise InputError(
                f"the file is empty: not even a {codec} header",
                where=f"{input.path}, byte 0",
                fix="copy or write it again",
            )
        with reading(input, file):
            yield Bounded(decompressed(file, codec), file, input)


@contextlib.contextmanager
def reading(input: InputFile, file: IO[bytes] | None = None) -> Iterator[None]:
    """Turn what goes wrong while an input is read into errors that name the file and the byte."""
    try:
        yield
    except OlmError:
        raise
    except FileNotFoundError as error:
        raise InputError("the file is not there", where=input.path) from error
    except (PermissionError, IsADirectoryError) as error:
        if "://" in input.url:
            raise _remote_failure(input, error) from error
        raise InputError("the file may not be read", where=input.path) from error
    except (
        pa.ArrowInvalid,
        pa.ArrowNotImplementedError,
        DecompressionError,
        EOFError,
        UnicodeDecodeError,
    ) as error:
        raise _damaged(input, file, error) from error
    except OSError as error:
        if error.errno is None and not is_connection(error):  # Arrow says what is wrong with bytes
            raise _damaged(input, file, error) from error
        if "://" not in input.url:
            raise InputError("the file cannot be read", where=input.path, why=str(error)) from error
        raise _remote_failure(input, error) from error
    except Exception as error:
        if "://" in input.url and is_connection(error):
            raise _remote_failure(input, error) from error
        raise


def _damaged(input: InputFile, file: IO[bytes] | None, error: BaseException) -> InputError:
    where = input.path
    if file is not None and not file.closed:
        where += f", near byte {file.tell()} of {input.bytes}"
    if "Dictionary mismatch" in str(error):  # zstd's words
        return InputError(
            "the file was compressed with a zstd dictionary, which is not read",
            where=input.path,
            fix="unpack it with the dictionary: zstd -d -D DICTIONARY FILE",
        )
    return InputError(
        "the file is truncated or damaged",
        where=where,
        why=said_by(error, 200),
        fix="copy or download it again, or leave it out",
    )


def _remote_failure(input: InputFile, error: BaseException) -> StorageError:
    if input.url.startswith("hf://") and is_connection(error):
        return unreachable(input.path, error)
    return StorageError(
        f"remote storage fails ({type(error).__name__})",
        where=input.path,
        fix="check the address, the credentials and the network, then run the same command again",
    )


def local_revision(url: str) -> str:
    """Return what changes when a local file may have changed.

    Raises:
        OSError: it is gone.
    """
    stat = os.stat(url)
    return f"{stat.st_mtime_ns}-{stat.st_size}"
