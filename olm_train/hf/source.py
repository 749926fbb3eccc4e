"""A model of transformers where it lies: a folder, or a repository of the hub at a commit.

    folder | hf://ORG/NAME[@REVISION] -> pinned: absolute folder | hf://ORG/NAME@COMMIT
                                      -> config.json -> what the shape follows from
                                      -> fetched: config.json, *.safetensors, tokenizer.json

Fetched files lie in the cache of the hub's client. Its locks let one process of a machine fetch a
file while the others wait for it; an interrupted one goes on where it stopped. Never: fetches or
reads a pickle, or runs anything that lies there.
"""

from __future__ import annotations

import os
from pathlib import Path

from olm_data.bounded_json import JsonObject, MalformedJson, decode_object
from olm_data.canonical import sha256_file
from olm_data.dataset.tokenizer import TOKENIZER
from olm_data.errors import InputError, OlmError, UsageError, ValidationError, printable
from olm_data.exporting.model_folder import FORMAT
from olm_data.regular_files import MAX_CONFIG, MAX_WHOLE, open_regular, read_regular
from olm_data.storage.hub_repository import Repository, is_commit
from olm_data.storage.names import refuse_escape
from olm_data.storage.store import Store, absolute, is_remote
from olm_data.threads import in_order

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SUFFIX, SCHEME = ".safetensors", "hf://"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def is_transformers(place: str) -> bool:
    """Whether there is a model of transformers at a place, and none of our own.

    Args:
        place: local or remote; every `hf://` address is meant for one.

    Raises:
        UsageError: there is one in a bucket.
    """
    if place.startswith(SCHEME):
        return True
    if place.endswith(SUFFIX):
        return False
    try:
        fields = decode_object(Store(place).read(CONFIG, limit=MAX_CONFIG))
    except (OSError, OlmError, MalformedJson):
        return False
    if fields.get("format") == FORMAT or "model_type" not in fields:
        return False
    if is_remote(place):
        raise UsageError(
            "a model of transformers is read from a local folder or from the hub",
            where=printable(place),
            fix="copy the folder to a disk of each machine, or name its hf:// address",
        )
    return True


def pinned(place: str) -> str:
    """Return a place as it means the same to every rank and later: absolute, or at a commit.

    Raises:
        UsageError: an address that is none.
        InputError: there is no such repository or revision.
        StorageError: the hub cannot be reached.
    """
    if not place.startswith(SCHEME):
        return absolute(place)
    found = _repository(place)
    return place if is_commit(found.revision) else found.at(found.required_commit()).address


def read_fields(place: str) -> JsonObject:
    """Return the content of the config.json of a pinned place.

    Raises:
        InputError, ValidationError: there is none, or it is no JSON object.
        StorageError: the hub cannot be reached.
    """
    try:
        return decode_object(read_regular(_file(place, CONFIG), MAX_CONFIG))
    except MalformedJson as error:
        raise ValidationError(
            f"the {CONFIG} is malformed: {error}", where=place, fix="restore it from a copy"
        ) from error


def fetch(place: str) -> Path:
    """Return the folder with the files of a pinned place; of the hub they are fetched.

    Raises:
        InputError: a file that it needs is not there; there are only pickles.
        StorageError: the hub cannot be reached.
    """
    folder = _file(place, CONFIG).parent
    for name in weight_files(place):
        _file(place, name)
    _optional(place, TOKENIZER)
    return folder


def weight_files(place: str) -> list[str]:
    """Return the names of the files with the tensors of a pinned place, by its index if it has one.

    Raises:
        InputError: there are none.
        ValidationError: the index is malformed, or names files elsewhere.
    """
    if _optional(place, WHOLE) is not None:
        return [WHOLE]
    index = _optional(place, INDEX)
    if index is None:
        pickles = [name for name in _PICKLES if _optional(place, name, look=True) is not None]
        raise InputError(
            f"there are no weights as safetensors; {pickles[0]} is a pickle"
            if pickles
            else "there are no weights as safetensors",
            where=place,
            why="reading a pickle can run code" if pickles else f"neither {WHOLE} nor {INDEX}",
            fix="save the model anew with safe_serialization, where it is trusted, or use a "
            "revision that has safetensors",
        )
    try:
        names = decode_object(read_regular(index, MAX_WHOLE))["weight_map"]
        files = sorted({str(name) for name in names.values()})
    except (MalformedJson, KeyError, AttributeError) as error:
        raise ValidationError(
            f"the {INDEX} is malformed", where=place, fix="restore it from a copy"
        ) from error
    for name in files:
        refuse_escape(name)
        if "/" in name or not name.endswith(SUFFIX):
            raise ValidationError(
                f"the index names {printable(name[:80])!r} as a file of tensors",
                where=f"{place}/{INDEX}",
                fix="do not use this model",
            )
    return files


def read_tokenizer(place: str) -> bytes | None:
    """Return the tokenizer.json of a pinned place, None where there is none."""
    path = _optional(place, TOKENIZER)
    return None if path is None else read_regular(path, MAX_WHOLE)


def file_digests(place: str) -> dict[str, str]:
    """Return the sha256 of each file that is read of a fetched place."""
    folder = fetch(place)
    names = [CONFIG, *weight_files(place), TOKENIZER]
    there = [name for name in names if (folder / name).exists()]
    digests = in_order(lambda name: sha256_file(folder / name), there)
    return dict(zip(there, digests, strict=True))


def _repository(place: str) -> Repository:
    found = Repository.parse(place)
    if found.kind != "model":
        raise UsageError(
            "this is the address of a dataset, not of a model",
            where=printable(place),
            fix=f"hf://{found.name}",
        )
    return found


def _file(place: str, name: str) -> Path:
    path = _optional(place, name)
    if path is None:
        raise InputError(
            f"there is no {printable(name)}",
            where=place,
            fix="name a folder or repository with a model of transformers, all of its files in it",
        )
    return path


def _optional(place: str, name: str, *, look: bool = False) -> Path | None:
    """Return where a file lies, fetched if need be; None: there is none.

    Args:
        look: do not fetch it.
    """
    if place.startswith(SCHEME):
        found = _repository(place)
        assert found.revision is not None, "pinned first"
        if look:
            return Path(name) if name in found.files(found.revision) else None
        return found.cached(name, found.revision)
    path = Path(place) / name
    if not os.path.exists(path):
        return None
    open_regular(path).close()  # no pipe, no device
    return path
