"""Which files an argument stands for, and what among them is not read.

    arguments (path, glob, folder, gs://..., hf://...) -> list_files -> Listing(files, passed)

A folder is read whole, whatever formats are mixed in it. What is not read is never dropped in
silence: each such file is in `passed` with its reason.
"""

from __future__ import annotations

import glob
import os
import posixpath
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from olm_data.bounded_json import decode
from olm_data.dataset.inputs import InputFile
from olm_data.errors import InputError, OlmError, UsageError, printable, refuse_secrets
from olm_data.path_kinds import NO_TEXT, kind_of, nearest, wrong_kind
from olm_data.regular_files import MAX_CONFIG, read_regular
from olm_data.sources import hub_files, remote_files
from olm_data.sources.files import local_revision, open_stream, reading
from olm_data.sources.formats import KNOWN, as_array, describe, format_of, is_json
from olm_data.sources.passed import SkippedFile
from olm_data.storage.names import is_working
from olm_data.threads import in_order

# Files of a `datasets` folder that describe it and hold no documents.
_METADATA = frozenset(
    {"dataset_info.json", "dataset_dict.json", "state.json", "dataset_infos.json"}
)
_ABOUT = re.compile(
    r"(readme|licen[cs]e|copying|notice|authors|citation|contributing|changelog|changes)"
    r"([-_.][^/]*)?",
    re.IGNORECASE,
)

_HEAD = 256
"""Bytes that tell an array from JSON Lines."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What arguments stand for.

    Attributes:
        files: in the order of the arguments, by path within each.
        passed: what lies among them and is not read.
    """

    files: tuple[InputFile, ...]
    passed: tuple[SkippedFile, ...] = ()


def list_files(arguments: Sequence[str]) -> Listing:
    """Return the files that `arguments` name.

    A folder stands for its files of known formats, recursively. In a folder with records (JSONL,
    parquet, ...) a README, a LICENSE and their like are not documents; in one of texts they are.

    Raises:
        InputError: nothing is there, a format is not known, or a file is named twice.
        StorageError: remote storage fails.
    """
    found: list[InputFile] = []
    passed: list[SkippedFile] = []
    for argument in arguments:
        scheme = urlsplit(argument).scheme if "://" in argument else ""
        if scheme in ("", "file"):
            listing = _local_files(argument.removeprefix("file://"))
        else:
            refuse_secrets(argument)
            listing = _remote_files(argument)
        found += listing.files
        passed += listing.passed
    seen: set[str] = set()
    for file in found:
        if file.url in seen:
            raise InputError("the same file is named twice", where=file.url)
        seen.add(file.url)
    files = _named_from_common_root(_with_arrays(found))
    passed += [SkippedFile(file.path, "empty") for file in files if file.bytes == 0]
    return Listing(tuple(files), tuple(passed))


def _with_arrays(files: list[InputFile]) -> list[InputFile]:
    """Look into .json files: one that begins with a bracket is an array, else JSON Lines."""
    asked = [file for file in files if is_json(file.url)]
    answers = zip(asked, in_order(_is_array, asked), strict=True)
    arrays = {file.url for file, found in answers if found}
    return [as_array(file) if file.url in arrays else file for file in files]


def _is_array(input: InputFile) -> bool:
    """Whether a .json file begins as an array does.

    Raises:
        InputError, StorageError: it cannot be read.
    """
    if not input.bytes:
        return False
    with open_stream(input) as stream, reading(input):
        return bool(stream.read(_HEAD).removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n")[:1] == b"[")


def _local_files(argument: str) -> Listing:
    path = os.path.expanduser(argument)
    found_kind = kind_of(path)
    if found_kind in NO_TEXT:
        raise wrong_kind(argument, found_kind, "text")
    if os.path.isdir(path):
        names, passed = _local_folder(path)
    elif os.path.exists(path):
        names, passed = [path], []
    elif glob.has_magic(path):
        names, passed = _local_pattern(path)
    else:
        raise _missing(argument, path)
    return Listing(tuple(map(_local_file, names)), tuple(passed))


def _missing(argument: str, path: str) -> OlmError:
    if os.path.islink(path):
        why, fix = (
            f"it leads to {printable(os.readlink(path))}",
            "correct the link, or name the file itself",
        )
        return InputError("this link leads nowhere", where=argument, why=why, fix=fix)
    if argument.startswith("hf:"):
        return UsageError(
            "a dataset of the hub is a source, not an input file",
            where=argument,
            fix=f"--source {printable(argument)}",
        )
    return InputError(
        "there is no such file or folder", where=argument, fix=nearest(path, "check the path")
    )


def _local_pattern(pattern: str) -> tuple[list[str], list[SkippedFile]]:
    """Return the files a pattern matches; hidden ones and folders it stops at are passed over."""
    matched = sorted(glob.glob(pattern, recursive=True))
    hidden = sorted({*glob.glob(pattern, recursive=True, include_hidden=True)} - {*matched})
    hidden = [name for name in hidden if not is_working(name)]
    names = [name for name in matched if os.path.isfile(name)]
    passed = [SkippedFile(name, "hidden") for name in hidden if not _below_one_of(name, hidden)]
    for name in matched:
        if os.path.isdir(name):
            inside = posixpath.join(name, "")
            if not any(other.startswith(inside) for other in names):
                passed.append(SkippedFile(inside, "folder"))
        elif not os.path.isfile(name):
            passed.append(SkippedFile(name, "special"))
    chosen = _with_known_names(names, passed, pattern) if names else []
    if not chosen:
        raise InputError("no file matches", where=pattern, fix="check the pattern")
    return chosen, [replace(item, path=_shown(item.path)) for item in passed]


def _below_one_of(name: str, others: Iterable[str]) -> bool:
    return any(name.startswith(f"{other.rstrip('/')}/") for other in others if other != name)


def _shown(path: str) -> str:
    """Return a matched name without the folders of this machine."""
    return os.path.join(*Path(path).parts[-2:]) if os.path.isabs(path) else path


def _local_folder(path: str) -> tuple[list[str], list[SkippedFile]]:
    """Return the data files of a folder, sorted; those of a `datasets` folder in its own order."""
    if os.path.isfile(os.path.join(path, "dataset_dict.json")):
        splits = sorted(n for n in os.listdir(path) if os.path.isdir(os.path.join(path, n)))
        raise InputError(
            "the folder holds several splits of a dataset",
            where=path,
            fix=f"name one: {', '.join(os.path.join(path, name) for name in splits)}",
        )
    names, passed = _walk(path)
    if os.path.isfile(os.path.join(path, "state.json")):
        chosen = _saved_dataset(path)
        rest = [name for name in names if os.path.abspath(name) not in set(chosen)]
        for name in rest:
            described = os.path.basename(name) in _METADATA
            passed.append(SkippedFile(name, "metadata" if described else "unlisted"))
    else:
        chosen = _data_files(names, passed, path)
    above = os.path.dirname(os.path.abspath(path))
    return chosen, [_relative(item, above) for item in passed]


def _saved_dataset(path: str) -> list[str]:
    """Return the files that state.json names, in its order."""
    state = Path(path) / "state.json"
    try:
        names = [
            item["filename"] for item in decode(read_regular(state, MAX_CONFIG))["_data_files"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError("state.json of the dataset folder is damaged", where=str(state)) from error
    return [os.path.abspath(os.path.join(path, os.path.basename(name))) for name in names]


def _walk(path: str) -> tuple[list[str], list[SkippedFile]]:
    """Return the regular files below a folder, links to files included, and what is no such file.

    Raises:
        InputError: a folder may not be read.
    """

    def refuse(error: OSError) -> None:
        raise InputError(
            "a folder among the inputs cannot be read",
            where=str(error.filename),
            why=error.strerror,
            fix="change its permissions, or name the files to read",
        ) from error

    found: list[str] = []
    passed: list[SkippedFile] = []
    for folder, folders, files in os.walk(path, onerror=refuse):
        for name in list(folders):
            place = os.path.join(folder, name)
            if is_working(name):
                folders.remove(name)
            elif name.startswith(".") or os.path.islink(place):
                reason = "hidden" if name.startswith(".") else "link"
                passed.append(SkippedFile(f"{place}/", reason))
                folders.remove(name)
        for name in files:
            place = os.path.join(folder, name)
            if is_working(name):
                continue
            if name.startswith("."):
                passed.append(SkippedFile(place, "hidden"))
            elif _is_special(place):
                passed.append(SkippedFile(place, "special"))
            else:
                found.append(place)
    return found, passed


def _is_special(path: str) -> bool:
    """Whether a name leads to something that is there and no regular file."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False  # a link that leads nowhere: whoever opens it says so


def _data_files(names: list[str], passed: list[SkippedFile], where: str) -> list[str]:
    """Return the files of known formats, sorted by path; add the others to `passed`."""
    records = any(
        format_of(name) not in (None, "txt") and posixpath.basename(name) not in _METADATA
        for name in names
    )
    kept = []
    for name in names:
        last = posixpath.basename(name)
        if last in _METADATA:
            passed.append(SkippedFile(name, "metadata"))
        elif records and format_of(name) in (None, "txt") and _ABOUT.fullmatch(last):
            passed.append(SkippedFile(name, "about"))
        else:
            kept.append(name)
    chosen = _with_known_names(kept, passed, where)
    if not chosen:
        raise InputError(
            "the folder holds no file of a known format", where=where, fix=f"known: {KNOWN}"
        )
    return sorted(chosen)


def _with_known_names(names: list[str], passed: list[SkippedFile], where: str) -> list[str]:
    """Return the names that tell a format; add the others to `passed`, unless there is no other.

    Raises:
        InputError: a pattern matches one file, and its format is not known.
    """
    known = [name for name in names if format_of(name)]
    passed += [SkippedFile(name, "format") for name in names if not format_of(name)]
    if not known and glob.has_magic(where) and names:
        describe(names[0], 0, "")
    return known


def _relative(item: SkippedFile, above: str) -> SkippedFile:
    slash = "/" * item.path.endswith("/")
    return replace(item, path=os.path.relpath(item.path, above) + slash)


def _local_file(name: str) -> InputFile:
    url = os.path.abspath(name)
    if _is_special(url):
        raise InputError(
            "this is a pipe, a socket or a device, not a file",
            where=name,
            why="it can be read once only, so an interrupted run could not go on",
            fix="name a file, or pipe it: olm-data tokenize - --format jsonl < PIPE",
        )
    try:
        return describe(url, os.path.getsize(url), local_revision(url))
    except OSError as error:
        raise InputError("the file cannot be read", where=name, why=str(error)) from error


def _remote_files(argument: str) -> Listing:
    hub = argument.startswith("hf://")
    if hub:
        argument = hub_files.pinned(argument)
    listed = hub_files.listed if hub else remote_files.listed
    found = {item.url: item for item in sorted(listed(argument))}
    chosen = [url for url in found if not url.endswith("/")]
    passed = [
        SkippedFile(url, "folder")
        for url in found
        if url.endswith("/") and not any(other.startswith(url) for other in chosen)
    ]
    above = argument
    if glob.has_magic(argument):
        chosen = _with_known_names(chosen, passed, argument)
        above = re.split(r"[*?\[]", argument)[0]
    elif chosen and chosen != [argument.rstrip("/")]:  # a folder
        chosen = _remote_folder(chosen, passed, argument)
    if not chosen:
        raise InputError(
            "there is no such file",
            where=argument,
            why="nothing there matches" if glob.has_magic(argument) else None,
            fix="check the address; a folder's files of text are read, and those a pattern matches",
        )
    above = posixpath.dirname(above.rstrip("/"))

    def shown(url: str) -> str:
        return hub_files.shown_path(url) if hub else posixpath.relpath(url, above)

    return Listing(
        tuple(describe(*found[url]) for url in chosen),
        tuple(replace(item, path=shown(item.path)) for item in passed),
    )


def _remote_folder(names: list[str], passed: list[SkippedFile], folder: str) -> list[str]:
    """Return the data files below a remote folder, as `_local_folder` chooses them."""
    shown = []
    for name in names:
        below = name.removeprefix(folder.rstrip("/"))
        if is_working(below):
            continue
        if any(part.startswith(".") for part in below.split("/")):
            passed.append(SkippedFile(name, "hidden"))
        else:
            shown.append(name)
    return _data_files(shown, passed, folder)


def _named_from_common_root(files: list[InputFile]) -> list[InputFile]:
    """Give each file its display path: hub files by repository, others from their common root."""
    places = {file.url: file.url.partition("://")[2] or file.url for file in files}
    parents = [posixpath.dirname(p) for url, p in places.items() if not url.startswith("hf://")]
    root = posixpath.commonpath(parents) if parents else ""
    for url, place in places.items():
        if url.startswith("hf://"):
            places[url] = hub_files.shown_path(url)
        elif root:
            places[url] = posixpath.relpath(place, root)
    return [msgspec.structs.replace(file, path=places[file.url]) for file in files]
