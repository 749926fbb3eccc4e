"""Input files in dataset repositories of the hub: what a URL names, pinned to a commit.

hf://datasets/ORG/NAME/PATH -> pinned -> one_or_all -> name -> info -> revision, shown_path
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from olm_data.errors import InputError, UsageError
from olm_data.storage.hub import dataset_commit


def shown_path(url: str) -> str:
    """Return `ORG/NAME/path` of `hf://datasets/ORG/NAME@commit/path`."""
    parts = url.removeprefix("hf://").split("/")
    if parts[0] in ("datasets", "spaces"):
        parts = parts[1:]
    parts[1] = parts[1].partition("@")[0]
    return "/".join(parts)


def one_or_all(fs: Any, path: str) -> tuple[dict[str, Any], bool]:
    """Return name -> info of one remote file, or of all below a folder; and whether it is one."""
    try:
        info = fs.info(path)
    except FileNotFoundError:
        return {}, False
    if info["type"] != "directory":
        return {path: info}, False
    return fs.find(path, detail=True), True


def revision(info: dict[str, Any]) -> str:
    """Return what changes when the file does: its content's digest, and its size."""
    tag = info.get("blob_id") or info.get("oid")
    return f"{str(tag).strip(chr(34))}-{info.get('size')}"


def pinned(fs: Any, url: str) -> str:
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
