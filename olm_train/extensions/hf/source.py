"""A model of transformers where it lies: a folder, local or remote, or a repository of the hub.

    folder | s3://... | hf://ORG/NAME[@REVISION] -> pinned: absolute folder | hf://ORG/NAME@COMMIT
                           -> config.json -> what the shape follows from
                           -> fetched: config.json, *.safetensors, tokenizer.json of the hub alone

Fetched files lie in the cache of the hub's client. Its locks let one process of a machine fetch a
file while the others wait for it; an interrupted one goes on where it stopped. In a bucket files
are read where they lie. A local file may be a link, as those in that cache are. Never: fetches or
reads a pickle, or runs anything that lies there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from olm_data.bounded_json import (
    JsonObject,
    MalformedJson,
    decode_configuration,
    decode_object,
    sha256_file,
)
from olm_data.dataset.tokenizer import TOKENIZER
from olm_data.errors import InputError, OlmError, UsageError, ValidationError, printable
from olm_data.model_folder import FORMAT
from olm_data.regular_files import MAX_CONFIG, MAX_SMALL, MAX_WHOLE, open_regular, read_regular
from olm_data.storage.hub import Repository, is_commit, is_offline
from olm_data.storage.store import Store, absolute, is_remote
from olm_data.threads import in_order

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
SUFFIX, SCHEME = ".safetensors", "hf://"
_FILE = re.compile(r"[^/\\]{1,200}\.safetensors")
_OFFLINE = "HF_HUB_OFFLINE is set, and it is not in the cache of the hub's client"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "tekken.json")


def is_transformers(place: str) -> bool:
    """Whether there is a model of transformers at a place, and none of our own.

    Args:
        place: local or remote; every `hf://` address is meant for one.

    Raises:
        UsageError, StorageError: the address is none, or the store cannot be reached.
    """
    if place.startswith(SCHEME):
        return True
    if place.endswith(SUFFIX):
        return False
    try:
        fields = read_beside(place.rstrip("/"), CONFIG) or {}
    except (OSError, ValidationError):
        return False
    return fields.get("format") != FORMAT and "model_type" in fields


def pinned(place: str) -> str:
    """Return a place as it means the same to every rank and later: absolute, or at a commit.

    With HF_HUB_OFFLINE that is the commit in the cache of the hub's client.

    Raises:
        UsageError: an address that is none.
        InputError: there is no such repository or revision.
        StorageError: the hub cannot be reached.
    """
    if not place.startswith(SCHEME):
        return absolute(place).rstrip("/")
    found = _repository(place)
    if is_commit(found.revision):
        return place
    known = found.cached_commit(CONFIG) if is_offline() else None
    return found.at(known or found.required_commit()).address


def read_fields(place: str) -> JsonObject:
    """Return the content of the config.json of a pinned place.

    Raises:
        InputError, ValidationError: there is none, or it is no JSON object.
        StorageError: the hub or store cannot be reached.
    """
    found = read_beside(place, CONFIG)
    if found is None:
        raise _missing(place, CONFIG)
    return found


def read_beside(place: str, name: str) -> JsonObject | None:
    """Return the content of a JSON file of a pinned place, None where there is none.

    Raises:
        ValidationError: it is no JSON object.
        StorageError: the hub or store cannot be reached.
    """
    data = _read(place, name, MAX_CONFIG)
    try:
        return None if data is None else decode_configuration(data)
    except MalformedJson as error:
        raise ValidationError(
            f"the {name} is malformed: {error}", where=place, fix="restore it from a copy"
        ) from error


def text_beside(place: str, name: str) -> str | None:
    """Return the text of a file of a pinned place, None where there is none.

    Raises:
        ValidationError: it is no UTF-8.
        StorageError: the hub or store cannot be reached.
    """
    data = _read(place, name, MAX_SMALL)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError as error:
        raise ValidationError(f"the {name} is no UTF-8", where=place) from error


def fetch(place: str) -> str:
    """Return the folder with the files of a pinned place, local or remote; of the hub it is local.

    Raises:
        InputError: a file that it needs is not there; there are only pickles.
        StorageError: the hub or store cannot be reached.
    """
    names = [CONFIG, *weight_files(place)]
    for name in names:
        if not _has(place, name):
            raise _missing(place, name)
    _has(place, TOKENIZER)
    if not place.startswith(SCHEME):
        return place
    path = _cached(place, CONFIG)
    assert path is not None
    return str(path.parent)


def weight_files(place: str) -> list[str]:
    """Return the names of the files with the tensors of a pinned place, by its index if it has one.

    Raises:
        InputError: there are none.
        ValidationError: the index is malformed, or names files elsewhere.
    """
    if _has(place, WHOLE):
        return [WHOLE]
    index = _read(place, INDEX, MAX_WHOLE)
    if index is None and _is_cache(place):
        raise _missing(place, f"{WHOLE} or {INDEX}")
    if index is None:
        pickles = [name for name in _PICKLES if _has(place, name, look=True)]
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
        names = decode_object(index)["weight_map"]
        files = sorted({str(name) for name in names.values()})
    except (MalformedJson, KeyError, AttributeError) as error:
        raise ValidationError(
            f"the {INDEX} is malformed", where=place, fix="restore it from a copy"
        ) from error
    if not files:
        raise ValidationError(
            "the index names no file of tensors",
            where=f"{place}/{INDEX}",
            fix="restore it from a copy",
        )
    for name in files:
        if _FILE.fullmatch(name) is None or not name.isprintable():
            raise ValidationError(
                f"the index names {printable(name[:80])!r} as a file of tensors",
                where=f"{place}/{INDEX}",
                fix="do not use this model",
            )
    return files


def read_tokenizer(place: str) -> bytes | None:
    """Return the tokenizer.json of a pinned place, None where there is none."""
    return _read(place, TOKENIZER, MAX_WHOLE)


def no_tokenizer(place: str, why: str) -> InputError:
    """Return the error that a pinned place has no tokenizer.json; names the file it has instead."""
    try:
        others = [name for name in _OTHER_TOKENIZERS if _has(place, name, look=True)]
    except OlmError:  # offline
        others = []
    return InputError(
        f"the model comes without a {TOKENIZER}" + "".join(f"; it has a {n}" for n in others[:1]),
        where=place,
        why=_OFFLINE if _is_cache(place) else why,
        fix="make one where transformers is: "
        "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER); put it into the folder"
        if others
        else f"put the {TOKENIZER} that belongs to it into the folder",
    )


def file_digests(place: str, part: int = 0, parts: int = 1) -> dict[str, str]:
    """Return the sha256 of files that are read of a fetched place: of all, or of a part of them.

    Args:
        part, parts: which part, and how many there are: each rank takes one.
    """
    folder = fetch(place)
    there = [CONFIG, *weight_files(place), *([TOKENIZER] if _has(place, TOKENIZER) else [])]
    mine = there[part::parts]
    if is_remote(folder):
        digests = in_order(Store(folder).sha256, mine)
    else:
        digests = in_order(lambda name: sha256_file(Path(folder) / name), mine)
    return dict(zip(mine, digests, strict=True))


def _repository(place: str) -> Repository:
    found = Repository.parse(place)
    if found.kind != "model":
        raise UsageError(
            "this is the address of a dataset, not of a model",
            where=place,
            fix=f"hf://{found.name}",
        )
    return found


def _missing(place: str, name: str) -> InputError:
    return InputError(
        f"there is no {printable(name)}",
        where=place,
        why=_OFFLINE if _is_cache(place) else None,
        fix="name a folder or repository with a model of transformers, all of its files in it",
    )


def _is_cache(place: str) -> bool:
    """Whether what counts of a place is what lies in the cache of the hub's client."""
    return place.startswith(SCHEME) and is_offline()


def _has(place: str, name: str, *, look: bool = False) -> bool:
    """Whether there is a file; of the hub it is fetched.

    Args:
        look: do not fetch it.
    """
    if look and place.startswith(SCHEME):
        found = _repository(place)
        return name in found.files(found.revision or "")
    if is_remote(place) and not place.startswith(SCHEME):
        return Store(place).exists(name)
    return _cached(place, name) is not None


def _read(place: str, name: str, limit: int) -> bytes | None:
    """Return the bytes of a file, None where there is none."""
    if is_remote(place) and not place.startswith(SCHEME):
        try:
            return Store(place).read(name, limit=limit)
        except FileNotFoundError:
            return None
    path = _cached(place, name)
    return None if path is None else read_regular(path, limit)


def _cached(place: str, name: str) -> Path | None:
    """Return where a file lies on this machine, fetched if need be; None: there is none."""
    if place.startswith(SCHEME):
        found = _repository(place)
        assert found.revision is not None, "pinned first"
        return found.cached(name, found.revision)
    path = Path(place) / name
    if not os.path.exists(path):
        return None
    open_regular(path).close()  # no pipe, no device
    return path
