"""The same content under two names: found before any work is done.

    inputs of equal size -> first and last 64 KiB -> remote with one ETag: the same
                                                  -> sha256 of all bytes   -> pairs

Files that hold one document each (text without a separator) are not compared: equal ones are
duplicate documents, which are counted as such. Reads in bounded pieces. Never: loads a file whole.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from olm_data.dataset.inputs import InputFile, ReadOptions
from olm_data.sources.files import open_binary, reading

EDGE_BYTES = 64 << 10
PIECE_BYTES = 4 << 20
READERS = 8


def identical_inputs(
    inputs: Sequence[InputFile], options: ReadOptions
) -> list[tuple[InputFile, InputFile]]:
    """Return (later, first) pairs of inputs whose bytes are the same.

    Raises:
        InputError: a file cannot be read.
        StorageError: remote storage fails.
    """
    chosen = [
        item
        for item in inputs
        if item.bytes > 0 and not (item.format == "txt" and options.separator is None)
    ]
    groups = _grouped([chosen], lambda item: item.bytes)
    with ThreadPoolExecutor(READERS) as pool:
        for key in (_digest, _edges):
            groups = _grouped(groups, key, pool)
        tagged = [group for group in groups if len({_tag(item) for item in group}) == 1]
        others = [group for group in groups if group not in tagged]
        groups = tagged + _grouped(others, _sha256, pool)
    position = {id(item): index for index, item in enumerate(inputs)}
    pairs = [(later, group[0]) for group in groups for later in group[1:]]
    return sorted(pairs, key=lambda pair: position[id(pair[0])])


def _grouped(
    groups: Iterable[list[InputFile]],
    key: Callable[[InputFile], Hashable],
    pool: ThreadPoolExecutor | None = None,
) -> list[list[InputFile]]:
    """Part each group by `key`; groups of one are left out."""
    found = []
    for group in groups:
        parted: dict[Hashable, list[InputFile]] = defaultdict(list)
        keys = pool.map(key, group) if pool else map(key, group)
        for item, value in zip(group, keys, strict=True):
            parted[value].append(item)
        found += [part for part in parted.values() if len(part) > 1]
    return found


def _digest(input: InputFile) -> str:
    """The digest the store has of the content, or "" where it has none that tells for certain.

    The hub's is one. An S3 ETag is not: of an object sent in parts, or encrypted, it is something
    else. It is never taken for a difference.
    """
    return input.revision if input.url.startswith("hf://") else ""


def _tag(input: InputFile) -> str:
    """A remote input's ETag or digest; equal size, edges and tag mean the same content."""
    tag = input.revision.rpartition("-")[0] if "://" in input.url else ""
    return tag or input.url


def _edges(input: InputFile) -> bytes:
    with reading(input), open_binary(input, ahead=False) as file:
        first = file.read(EDGE_BYTES)
        file.seek(max(0, input.bytes - EDGE_BYTES))
        return hashlib.sha256(first + file.read(EDGE_BYTES)).digest()


def _sha256(input: InputFile) -> bytes:
    digest = hashlib.sha256()
    with reading(input), open_binary(input) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.digest()
