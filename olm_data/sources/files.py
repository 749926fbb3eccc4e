"""Files, local and remote: listing, opening, decompressing; a damaged file or a lost connection?

    arguments (path, glob, folder, s3://..., hf://...) -> list_files -> InputFile, ... in order
    InputFile -> open_binary (seekable, as stored) | open_stream (decompressed, bounded memory)

`s3://` is read by the ETag that was listed (see `s3_files`), `hf://` by the commit.
"""

from __future__ import annotations

import contextlib
import glob
import os
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

import pyarrow as pa

from olm_data.errors import (
    InputError,
    OlmError,
    StorageError,
    UsageError,
    printable,
    refuse_secrets,
    suggest,
)
from olm_data.sources import s3_files
from olm_data.sources.base import Format, InputFile, PositionKind
from olm_data.sources.limits import Bounded
from olm_data.storage.hub import dataset_commit, hub_filesystem, is_connection

FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "txt",
    ".text": "txt",
    ".md": "txt",
}
_KNOWN = f"{', '.join(FORMATS)}, and .gz or .zst after JSONL and text"
CODECS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
POSITIONS: dict[Format, PositionKind] = {
    "jsonl": "byte",
    "parquet": "row",
    "arrow": "row",
    "txt": "byte",
}
# Files of a `datasets` folder that describe it and hold no documents.
NOT_DATA = frozenset({"dataset_info.json", "dataset_dict.json", "state.json", "dataset_infos.json"})


def list_files(arguments: Sequence[str]) -> list[InputFile]:
    """Return the files that `arguments` name: in the order of the arguments, by path within each.

    A folder stands for its data files, recursively; its text files count only where it has no
    JSONL, parquet or Arrow file (else a README would become a document).

    Raises:
        InputError: nothing is there, a format is not known, or a file is named twice.
        StorageError: remote storage fails.
    """
    found: list[InputFile] = []
    for argument in arguments:
        scheme = urlsplit(argument).scheme if "://" in argument else ""
        if scheme in ("", "file"):
            found += _local_files(argument.removeprefix("file://"))
        elif scheme in ("s3", "hf"):
            refuse_secrets(argument)
            found += _s3_files(argument) if scheme == "s3" else _hub_files(argument)
        else:
            raise UsageError(
                f"inputs at {scheme}:// are not supported",
                where=f"{scheme}://...",
                fix="use local paths, s3:// or hf://",
            )
    seen: set[str] = set()
    for file in found:
        if file.url in seen:
            raise InputError("the same file is named twice", where=printable(file.url))
        seen.add(file.url)
    return _named_from_common_root(found)


def codec_of(name: str) -> str | None:
    """Return "gzip", "zstd" or None by the ending of a file's name."""
    return CODECS.get(posixpath.splitext(name.lower())[1])


def format_of(name: str) -> Format | None:
    """Return the format that a file's name tells, or None."""
    stem, end = posixpath.splitext(name.lower())
    if end in CODECS:
        inner = FORMATS.get(posixpath.splitext(stem)[1])
        return inner if inner in ("jsonl", "txt") else None
    return FORMATS.get(end)


def describe(url: str, size: int, revision: str) -> InputFile:
    """Return the input for one file.

    Raises:
        InputError: its name tells no known format.
    """
    kind = format_of(url)
    if kind is None:
        raise InputError(
            "the file's name tells no format that can be read",
            where=printable(url),
            fix=f"name it by its format: {_KNOWN}",
        )
    position = "line" if kind == "jsonl" and codec_of(url) else POSITIONS[kind]
    return InputFile(
        path=url, url=url, bytes=size, revision=revision, format=kind, position=position
    )


def current_revision(input: InputFile) -> str:
    """Return what `input.revision` would be if the file were listed now ("" where it is gone)."""
    if input.format == "hub" or input.url.startswith("hf://"):
        return input.revision  # pinned to a commit
    if "://" not in input.url:
        try:
            return _local_revision(input.url)
        except OSError:
            return ""
    return s3_files.current(input.url)


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
        if input.url.startswith("s3://"):
            revision, path = input.revision, input.path
            remote = s3_files.S3File(input.url, input.bytes, revision, path, ahead=ahead)
            return cast(IO[bytes], remote)
        cache = "readahead" if ahead else "none"
        file: IO[bytes] = hub_filesystem().open(
            input.url, "rb", block_size=8 << 20, cache_type=cache
        )
        return file


@contextlib.contextmanager
def open_stream(input: InputFile) -> Iterator[Any]:
    """Open an input decompressed, to be read once from the start with `.read(n)`.

    gzip and zstd, several frames too; a frame that wants a window above 128 MiB is refused, and so
    is one that unpacks to more than text can (see `limits`).

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
            unpacked = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
            yield Bounded(unpacked, file, input)


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
            raise _remote_failure(input.path, error) from error
        raise InputError("the file may not be read", where=input.path) from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, EOFError, UnicodeDecodeError) as error:
        raise _damaged(input, file, error) from error
    except OSError as error:
        if error.errno is None and not is_connection(error):  # Arrow says what is wrong with bytes
            raise _damaged(input, file, error) from error
        if "://" not in input.url:
            raise InputError("the file cannot be read", where=input.path, why=str(error)) from error
        raise _remote_failure(input.path, error) from error
    except Exception as error:
        if "://" in input.url and is_connection(error):
            raise _remote_failure(input.path, error) from error
        raise


def _damaged(input: InputFile, file: IO[bytes] | None, error: BaseException) -> InputError:
    where = input.path
    if file is not None and not file.closed:
        where += f", near byte {file.tell()} of {input.bytes}"
    return InputError(
        "the file is truncated or damaged",
        where=where,
        why=printable(str(error).splitlines()[0][:200]) if str(error) else type(error).__name__,
        fix="copy or download it again, or leave it out",
    )


def _remote_failure(path: str, error: BaseException) -> StorageError:
    return StorageError(
        f"remote storage fails ({type(error).__name__})",
        where=path,
        fix="check the address, the credentials and the network, then run the same command again",
    )


@contextlib.contextmanager
def _storage_errors(url: str) -> Iterator[None]:
    place = InputFile(path=url, url=url, bytes=0, revision="", format="txt", position="byte")
    with reading(place):
        yield


def _local_files(argument: str) -> list[InputFile]:
    path = os.path.expanduser(argument)
    if os.path.isdir(path):
        return [_local_file(name) for name in _local_folder(path)]
    if os.path.exists(path):
        return [_local_file(path)]
    if glob.has_magic(path):
        names = sorted(n for n in glob.glob(path, recursive=True) if os.path.isfile(n))
        if names:
            return [_local_file(name) for name in names]
        raise InputError("no file matches", where=printable(argument), fix="check the pattern")
    parent = os.path.dirname(path) or "."
    siblings = os.listdir(parent) if os.path.isdir(parent) else []
    near = suggest(os.path.basename(path), map(printable, siblings)) if siblings else ""
    raise InputError(
        "there is no such file or folder",
        where=printable(argument),
        fix=near if near.startswith("did") else "check the path",
    )


def _local_folder(path: str) -> list[str]:
    """Return the data files of a folder, sorted; those of a `datasets` folder in its own order."""
    if os.path.isfile(os.path.join(path, "dataset_dict.json")):
        splits = sorted(n for n in os.listdir(path) if os.path.isdir(os.path.join(path, n)))
        raise InputError(
            "the folder holds several splits of a dataset",
            where=printable(path),
            fix=f"name one: {', '.join(os.path.join(path, name) for name in splits)}",
        )
    state = Path(path) / "state.json"
    if state.is_file():
        import json

        try:
            names = [item["filename"] for item in json.loads(state.read_bytes())["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                "state.json of the dataset folder is damaged", where=printable(str(state))
            ) from error
        return [os.path.join(path, os.path.basename(name)) for name in names]
    names = [
        os.path.join(folder, name)
        for folder, folders, names in os.walk(path)
        for name in names
        if not name.startswith(".")
        and not any(part.startswith(".") for part in Path(folder).relative_to(path).parts)
        and folders is not None
    ]
    return _data_files(names, path)


def _data_files(names: list[str], where: str) -> list[str]:
    """Keep the files of known formats, text only where there is nothing else; sort by path."""
    names = [n for n in names if posixpath.basename(n) not in NOT_DATA and format_of(n)]
    structured = [n for n in names if format_of(n) != "txt"]
    if not names:
        raise InputError(
            "the folder holds no file of a known format",
            where=printable(where),
            fix=f"known: {_KNOWN}",
        )
    return sorted(structured or names)


def _local_file(name: str) -> InputFile:
    url = os.path.abspath(name)
    try:
        return describe(url, os.path.getsize(url), _local_revision(url))
    except OSError as error:
        raise InputError(
            "the file cannot be read", where=printable(name), why=str(error)
        ) from error


def _local_revision(url: str) -> str:
    stat = os.stat(url)
    return f"{stat.st_mtime_ns}-{stat.st_size}"


def _s3_files(argument: str) -> list[InputFile]:
    found = s3_files.listed(argument)
    if not found:
        raise InputError("there is no such file", where=printable(argument))
    if not glob.has_magic(argument) and found[0].url != argument:  # a folder
        chosen = set(_data_files([item.url for item in found], argument))
        found = [item for item in found if item.url in chosen]
    return [describe(*item) for item in found]


def _hub_files(argument: str) -> list[InputFile]:
    with _storage_errors(argument):
        fs = hub_filesystem()
        argument = _pinned(fs, argument)
        path = argument.partition("://")[2].rstrip("/")
        # Not fs.exists or fs.isdir: they take a store that does not answer for "no".
        many = glob.has_magic(path)
        infos = fs.glob(path, detail=True) if many else _remote_one(fs, path)
        files = [
            describe(f"hf://{name}", int(info["size"]), _remote_revision(info))
            for name, info in sorted(infos.items())
            if info["type"] == "file"
        ]
        if not files:
            raise InputError("there is no such file", where=printable(argument))
        return files


def _remote_one(fs: Any, path: str) -> dict[str, Any]:
    """Return name -> info of one remote file, or of the data files below a folder."""
    try:
        info = fs.info(path)
    except FileNotFoundError:
        return {}
    if info["type"] != "directory":
        return {path: info}
    infos = fs.find(path, detail=True)
    chosen = set(_data_files(list(infos), path))
    return {name: found for name, found in infos.items() if name in chosen}


def _remote_revision(info: dict[str, Any]) -> str:
    tag = info.get("blob_id") or info.get("oid")
    return f"{str(tag).strip(chr(34))}-{info.get('size')}"


def _pinned(fs: Any, url: str) -> str:
    """Return an `hf://` URL with the repository's revision as a commit."""
    try:
        place = fs.resolve_path(url)
    except (FileNotFoundError, NotImplementedError, ValueError) as error:
        raise InputError(
            "there is no such hub repository", where=url, fix="hf://datasets/ORG/NAME/PATH"
        ) from error
    if place.repo_type != "dataset":
        raise UsageError("only dataset repositories are inputs", where=url)
    commit = dataset_commit(place.repo_id, place.revision)
    return f"hf://{replace(place, revision=commit, _raw_revision=None).unresolve()}"


def _named_from_common_root(files: list[InputFile]) -> list[InputFile]:
    """Give each file its display path: hub files by repository, others from their common root."""
    named = [file for file in files if not file.url.startswith("hf://")]
    parents = [posixpath.dirname(file.url.partition("://")[2] or file.url) for file in named]
    root = posixpath.commonpath(parents) if parents else ""
    result = []
    for file in files:
        if file.url.startswith("hf://"):
            result.append(replace(file, path=hub_path(file.url)))
        else:
            path = file.url.partition("://")[2] or file.url
            result.append(replace(file, path=posixpath.relpath(path, root) if root else path))
    return result


def hub_path(url: str) -> str:
    """Return `ORG/NAME/path` of `hf://datasets/ORG/NAME@commit/path`."""
    parts = url.removeprefix("hf://").split("/")
    if parts[0] in ("datasets", "spaces"):
        parts = parts[1:]
    parts[1] = parts[1].partition("@")[0]
    return "/".join(parts)
