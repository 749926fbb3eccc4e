"""Gradients of a step on disk: each rank writes its own part, nothing is gathered.

    gradient (DTensor) -> this rank's block -> <work_dir>/gradients/step00000100/
        index.json             names, shapes, dtypes, pieces; written last: the folder is complete
        rank00000.safetensors  blocks of rank 0, and so on

The files are those of a checkpoint's tensors (docs/reference/checkpoint.md). Replicated parts are
written once, by the first rank of each replica.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from olm_data.errors import InputError
from olm_data.storage.disk import io_errors, write_durable
from olm_data.storage.store import Store
from olm_train.checkpoint.manifest import INDEX_NAME
from olm_train.checkpoint.tensors import (
    MAX_BYTES,
    Box,
    Index,
    StoredPiece,
    TensorsFile,
    dtype_name,
    fill,
    index_of,
    tensors_file,
)
from olm_train.distributed.world import World
from olm_train.model.shards import is_first_holder, local_blocks

FOLDER = "gradients"


def step_folder(work_dir: Path, step: int) -> Path:
    """Return the folder of a step's gradients."""
    return work_dir / FOLDER / f"step{step:08d}"


def write_gradients(
    work_dir: Path, step: int, gradients: Mapping[str, Tensor], world: World, first_n: int | None
) -> Path:
    """Write gradients; what an earlier attempt at the step left is removed. Every rank calls it.

    Args:
        gradients: by name of the parameter, whole or sharded; the same names on every rank.
        first_n: entries of each dimension that are kept; None: all.

    Returns:
        The folder of the step.

    Raises:
        ResourceError: a rank cannot write its part.
    """
    folder, own = step_folder(work_dir, step), tensors_file(world.rank)

    def begin() -> None:
        with io_errors(str(folder), writing=True):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    def write() -> list[StoredPiece]:
        parts = [
            part
            for name, gradient in gradients.items()
            if is_first_holder(gradient, main=world.main)
            for part in _parts(name, gradient, first_n)
        ]
        parts = [(box, part) for box, part in parts if part.numel()]
        with io_errors(str(folder / own), writing=True):
            # On a machine whose disk is not that of rank 0 the folder is not there yet.
            folder.mkdir(parents=True, exist_ok=True)
            with TensorsFile(folder / own, [box for box, _ in parts]) as file:
                return [file.add(part) for _, part in parts]

    def finish(pieces: list[StoredPiece]) -> None:
        wholes = {
            name: (
                dtype_name(gradient.dtype, name),
                tuple(min(size, first_n or size) for size in gradient.shape),
            )
            for name, gradient in gradients.items()
        }
        index = index_of(pieces, wholes, {"step": step, "first_n": first_n})
        with io_errors(str(folder), writing=True):
            write_durable(folder / INDEX_NAME, index.encode())

    world.on_main(begin)
    found = world.on_each(write)
    world.on_main(lambda: finish([piece for part in found for piece in part]))
    return folder


def read_gradients(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the gradients of a step, whole, by name; their first entries, if only those are kept.

    Args:
        folder: `gradients/step...`, with the files of all ranks.

    Raises:
        InputError: there are none, or they were not written to the end.
        ValidationError: a file is missing or damaged.
    """
    store = Store(folder)
    try:
        data = store.read(INDEX_NAME, limit=MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            "there are no gradients of a step, or they were not written to the end",
            where=store.url(INDEX_NAME),
            fix="give a folder `gradients/step...` of a run with dump_gradients",
        ) from error
    index = Index.decode(data, store.url(INDEX_NAME))
    sizes = {entry.name: entry.size for entry in store.entries() if entry.name != INDEX_NAME}
    index.check(sizes, store.url(INDEX_NAME))
    found = {n: torch.empty(e.shape, dtype=e.torch_dtype) for n, e in index.tensors.items()}
    fill(found, store, index)
    return found


def _parts(name: str, gradient: Tensor, first_n: int | None) -> Iterator[tuple[Box, Tensor]]:
    """Give what this rank holds of the entries of a gradient that are kept."""
    most = [min(size, first_n or size) for size in gradient.shape]
    for part, where in local_blocks(gradient):
        inner = tuple(
            slice(0, max(0, min(place.stop, size) - place.start))
            for place, size in zip(where, most, strict=True)
        )
        begins = tuple(place.start for place in where)
        yield Box(name, gradient.dtype, tuple(part[inner].shape), begins), part[inner]
