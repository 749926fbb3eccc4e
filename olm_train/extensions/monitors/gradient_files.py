"""Gradients of a step on disk: one safetensors file a rank, and an index that is written last.

    RUN/gradients/step00000012/rank00000.safetensors   the parts of tensors that rank 0 holds
                               index.json              step, ranks, shape and dtype of each tensor

Each rank writes what it has, so nothing is gathered, and no file is larger than a rank's share.
A part lies in the whole at the offsets that its file's metadata names. Never: pickle.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from olm_data.bounded_json import decode
from olm_data.errors import InputError, ValidationError, printable
from olm_data.regular_files import read_regular
from olm_data.storage.disk import io_errors, write_durable
from olm_train.distributed.world import World
from olm_train.model.shards import is_first_holder, local_block

FOLDER, INDEX = "gradients", "index.json"
FORMAT, VERSION = "olm-gradients", 1


class WholeTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A gradient as it was saved, whole: `dtype` as torch names it, such as "float32"."""

    shape: tuple[int, ...]
    dtype: str


class GradientIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `index.json` holds.

    Attributes:
        step: the step whose gradients they are, of its global batch and before clipping.
        ranks: number of files.
        first_n: entries that were kept of each dimension; None: all.
        tensors: by parameter name.
    """

    format: str
    version: int
    step: int
    ranks: int
    first_n: int | None
    tensors: dict[str, WholeTensor]


def step_folder(work_dir: Path, step: int) -> Path:
    """Return the folder of a step's gradients."""
    return work_dir / FOLDER / f"step{step:08d}"


def write_gradients(
    work_dir: Path, step: int, gradients: Mapping[str, Tensor], world: World, first_n: int | None
) -> Path:
    """Write gradients, whole or sharded; every rank calls it.

    Args:
        gradients: by parameter name, the same names on each rank.
        first_n: keep the first entries of each dimension only.

    Returns:
        The folder; what an earlier attempt at the step left there is gone.

    Raises:
        ResourceError: they cannot be written.
    """
    folder = step_folder(work_dir, step)
    wholes = {
        name: WholeTensor(
            shape=tuple(min(size, first_n or size) for size in gradient.shape),
            dtype=str(gradient.dtype).removeprefix("torch."),
        )
        for name, gradient in gradients.items()
    }

    def begin() -> None:
        with io_errors(str(folder), writing=True):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    def write() -> None:
        parts, offsets = _parts(gradients, wholes, world)
        path = folder / _file_of(world.rank)
        with io_errors(str(path), writing=True):
            # Ranks of other machines have folders of their own, unless they share a file system.
            folder.mkdir(parents=True, exist_ok=True)
            metadata = {"format": "pt", "offsets": msgspec.json.encode(offsets).decode()}
            save_file(parts, path, metadata=metadata)
            with open(path, "rb") as file:
                os.fsync(file.fileno())

    def finish() -> None:
        index = GradientIndex(
            format=FORMAT,
            version=VERSION,
            step=step,
            ranks=world.size,
            first_n=first_n,
            tensors=wholes,
        )
        with io_errors(str(folder), writing=True):
            write_durable(folder / INDEX, msgspec.json.encode(index))

    world.on_main(begin)
    world.on_each(write)
    world.on_main(finish)
    return folder


def read_index(folder: str | os.PathLike[str]) -> GradientIndex:
    """Return the index of a step's gradients.

    Raises:
        InputError: there are none, or they were not written to the end.
        ValidationError: the index is of another format or version.
    """
    path = Path(folder) / INDEX
    try:
        index = decode(read_regular(path), GradientIndex)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            "there are no gradients of a step, or they were not written to the end",
            where=str(path),
            fix="give a folder `gradients/step...` of a run with dump_gradients",
        ) from error
    except ValueError as error:
        raise ValidationError("this is no index of gradients", where=str(path)) from error
    if (index.format, index.version) != (FORMAT, VERSION):
        raise ValidationError(
            f"these gradients are {printable(index.format)} version {index.version}; this program "
            f"reads {FORMAT} version {VERSION}",
            where=str(path),
        )
    return index


def read_gradients(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the gradients of a step, whole and on the CPU, by parameter name.

    Args:
        folder: of the step, with the files of all ranks in it.

    Raises:
        InputError: there are none, or they were not written to the end.
        ValidationError: a file is missing, damaged, or does not fit the index.
    """
    index = read_index(folder)
    found = {
        name: torch.zeros(whole.shape, dtype=getattr(torch, whole.dtype))
        for name, whole in index.tensors.items()
    }
    filled = dict.fromkeys(found, 0)
    for rank in range(index.ranks):
        path = Path(folder) / _file_of(rank)
        try:
            with safe_open(path, "pt") as file:
                offsets = decode(file.metadata()["offsets"].encode(), dict[str, list[int]])
                for name, first in offsets.items():
                    part = file.get_tensor(name)
                    where = tuple(slice(a, a + n) for a, n in zip(first, part.shape, strict=True))
                    found[name][where] = part
                    filled[name] += part.numel()
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ValidationError(
                f"the gradients of rank {rank} are missing or damaged",
                where=str(path),
                why=str(error)[:200],
                fix="put the files of all ranks into the folder",
            ) from error
    short = [name for name, tensor in found.items() if filled[name] != tensor.numel()]
    if short:
        raise ValidationError(
            f"the files do not make up {len(short)} of {len(found)} gradients, such as "
            f"{printable(short[0])}",
            where=str(folder),
        )
    return found


def _parts(
    gradients: Mapping[str, Tensor], wholes: Mapping[str, WholeTensor], world: World
) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Return what this rank writes of each gradient, and where it begins in the whole."""
    parts, offsets = {}, {}
    for name, gradient in gradients.items():
        if not is_first_holder(gradient, main=world.main):
            continue
        part, where = local_block(gradient)
        inner = tuple(
            slice(0, max(0, min(place.stop, size) - place.start))
            for place, size in zip(where, wholes[name].shape, strict=True)
        )
        part = part[inner]
        if part.numel():
            parts[name] = part.cpu().contiguous()
            offsets[name] = [place.start for place in where]
    return parts, offsets


def _file_of(rank: int) -> str:
    return f"rank{rank:05d}.safetensors"
