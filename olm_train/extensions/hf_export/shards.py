"""safetensors files, written as their tensors come: which tensor lies in which file, and where.

    names, dtypes, shapes -> plan: files of at most so many bytes, a larger tensor has its own
    tensors, one by one   -> header, then bytes -> model-00001-of-00003.safetensors, fsynced
    a file                -> read back by the library safetensors -> sha256 of each tensor

The header comes first in a file, and the plan knows all of it before the first tensor is there. The
format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from olm_data.errors import ValidationError, printable
from olm_data.storage.disk import io_errors
from olm_train.checkpoint.tensors import Box, TensorsFile, bytes_of

MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
METADATA = {"format": "pt"}
"""Of each header: readers want to know whose tensors they are, and some fail without it."""


@dataclass(frozen=True)
class WeightsFile:
    """A file and the tensors in it, in their order."""

    file: str
    tensors: tuple[Box, ...]


def plan(tensors: Sequence[Box], shard_bytes: int) -> list[WeightsFile]:
    """Return the files for tensors, in their order.

    Args:
        tensors: all of them.
        shard_bytes: a file holds tensors of so many bytes at most, or a single larger one.
    """
    groups: list[list[Box]] = [[]]
    size = 0
    for each in tensors:
        if groups[-1] and size + each.bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += each.bytes
    if len(groups) == 1:
        return [WeightsFile(MODEL, tuple(groups[0]))]
    total = len(groups)
    return [
        WeightsFile(f"model-{number:05d}-of-{total:05d}.safetensors", tuple(group))
        for number, group in enumerate(groups, 1)
    ]


def index_of(shards: Sequence[WeightsFile], parameters: int) -> bytes | None:
    """Return `model.safetensors.index.json`; None for a single file, which has none.

    Args:
        shards: all files.
        parameters: of the model, a tied head counted once.
    """
    if len(shards) == 1:
        return None
    size = sum(each.bytes for shard in shards for each in shard.tensors)
    value = {
        "metadata": {"total_parameters": parameters, "total_size": size},
        "weight_map": {each.tensor: shard.file for shard in shards for each in shard.tensors},
    }
    return json.dumps(value, indent=2).encode() + b"\n"


def write_shard(folder: Path, shard: WeightsFile, values: Iterable[Tensor]) -> dict[str, str]:
    """Write a file, tensor by tensor, and wait until it is on the disk.

    Args:
        folder: to write to.
        shard: what goes into the file.
        values: its tensors in their order, each dropped once it is written; exactly as planned.

    Returns:
        sha256 of the bytes of each tensor, by name.

    Raises:
        ResourceError: the disk is full or fails.
    """
    digests, given = {}, iter(values)
    path = folder / shard.file
    with io_errors(str(path), writing=True), TensorsFile(path, shard.tensors) as file:
        for each in shard.tensors:
            value = next(given)
            assert (value.dtype, tuple(value.shape)) == (each.dtype, each.shape), each.tensor
            file.add(value)
            digests[each.tensor] = hashlib.sha256(bytes_of(value)).hexdigest()
            del value
    return digests


def refuse_other(folder: Path, shard: WeightsFile, written: Mapping[str, str]) -> None:
    """Refuse a file whose tensors the library safetensors reads as others than were written.

    Args:
        written: sha256 of the bytes of each tensor, by name.

    Raises:
        ValidationError: it is no such file, or holds other tensors or other bytes.
    """
    where, wrong = str(folder / shard.file), list[str]()
    try:
        with safe_open(where, framework="pt", device="cpu") as file:
            if file.metadata() != METADATA or set(file.keys()) != {e.tensor for e in shard.tensors}:
                raise ValidationError("the file holds other tensors than were written", where=where)
            for each in shard.tensors:
                value = file.get_tensor(each.tensor)
                if (value.dtype, tuple(value.shape)) != (each.dtype, each.shape):
                    raise ValidationError(f"{each.tensor} was written otherwise", where=where)
                if hashlib.sha256(bytes_of(value)).hexdigest() != written[each.tensor]:
                    wrong.append(each.tensor)
                del value
    except SafetensorError as error:
        raise ValidationError(
            f"what was written is no safetensors file: {printable(str(error))[:200]}", where=where
        ) from error
    if wrong:
        raise ValidationError(
            f"{', '.join(wrong[:3])} read back as other bytes than were written",
            where=shard.file,
            why="the disk or memory is faulty",
            fix="check the disk, and run the same command again",
        )
