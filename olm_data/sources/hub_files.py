"""Input files in dataset repositories of the hub: what a URL names, pinned to a commit.

hf://datasets/ORG/NAME/PATH -> pinned -> listed -> (URL, bytes, revision), ...
                                         shown_path: a file's name in manifests and messages
"""

from __future__ import annotations

import glob
from dataclasses import replace

from olm_data.dataset.inputs import InputFile
from olm_data.errors import InputError, UsageError
from olm_data.sources.files import reading
from olm_data.sources.remote_files import Listed
from olm_data.storage.hub import Repository, hub_filesystem


def shown_path(url: str) -> str:
    """Return `ORG/NAME/path` of `hf://datasets/ORG/NAME@commit/path`."""
    parts = url.removeprefix("hf://").split("/")
    if parts[0] in ("datasets", "spaces"):
        parts = parts[1:]
    parts[1] = parts[1].partition("@")[0]
    return "/".join(parts)


def pinned(url: str) -> str:
    """Return an `hf://` URL with the repository's revision as a commit.

    Raises:
        InputError: there is no such repository.
        UsageError: it holds no dataset.
        StorageError: the hub cannot be reached.
    """
    with reading(_input(url)):
        try:
            place = hub_filesystem().resolve_path(url)
        except (FileNotFoundError, NotImplementedError, ValueError) as error:
            raise InputError(
                "there is no such hub repository", where=url, fix="hf://datasets/ORG/NAME/PATH"
            ) from error
        if place.repo_type != "dataset":
            raise UsageError("only dataset repositories are inputs", where=url)
        commit = Repository("dataset", place.repo_id, place.revision).required_commit()
    return f"hf://{replace(place, revision=commit, _raw_revision=None).unresolve()}"


def listed(url: str) -> list[Listed]:
    """Return the file of a pinned URL, or those below a folder or that match a pattern.

    The URL of a folder that matches a pattern ends with "/".

    Raises:
        StorageError: the hub cannot be reached.
    """
    fs, path = hub_filesystem(), url.removeprefix("hf://").rstrip("/")
    with reading(_input(url)):
        if glob.has_magic(path):
            found = fs.glob(path, detail=True)
        else:
            # Not fs.exists or fs.isdir: they take a store that does not answer for "no".
            try:
                info = fs.info(path)
            except FileNotFoundError:
                return []
            is_folder = info["type"] == "directory"
            found = fs.find(path, detail=True) if is_folder else {path: info}
    result = []
    for name, info in found.items():
        end = "" if info["type"] == "file" else "/"
        size = info.get("size")
        # what changes when the file does: its content's digest, and its size
        tag = str(info.get("blob_id") or info.get("oid")).strip('"')
        result.append(Listed(f"hf://{name}{end}", int(size or 0), f"{tag}-{size}"))
    return result


def _input(url: str) -> InputFile:
    """Return what errors name before there are files."""
    return InputFile(path=url, url=url, bytes=0, revision="", format="txt", position="byte")
