"""Several checkpoints to one: the weighted mean of their weights, without an optimiser.

checkpoints, weights -> of one model? -> a tensor at a time, summed in fp64 -> FOLDER, merge.json
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from olm_data.errors import ConflictError, OlmError, UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.storage.disk import scratch, write_durable
from olm_data.storage.store import Store, absolute
from olm_train.checkpoint.documents import relative_path
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.manifest import (
    CONFIG,
    INDEX_NAME,
    LOCK,
    MERGE,
    STATE,
    TOKENIZER,
    CheckpointManifest,
    Kind,
    step_of,
)
from olm_train.checkpoint.merged import Merge, MergedFrom, folder_of_paths, merge_of
from olm_train.checkpoint.save import Contents, save_checkpoint
from olm_train.checkpoint.tensors import Box, TensorsFile, fill, index_of, tensors_file
from olm_train.distributed.world import World
from olm_train.extensions.averaging.weighting import Weighting, shares


def parts(
    checkpoints: Sequence[Checkpoint], weights: Weighting | Sequence[float]
) -> tuple[list[float], Merge]:
    """Return what each checkpoint counts of 1, and what `merge.json` says of that.

    With `uniform` a checkpoint that is a merge counts as often as the weights it is the mean of, so
    merges of parts make the merge of the whole.

    Raises:
        UsageError: there are not as many numbers as checkpoints, or they are no weights; or a
            merge has no place in the order of steps that `linear` and `decay` go by.
    """
    earlier = [merge_of(checkpoint) for checkpoint in checkpoints]
    counts = [1 if merge is None else merge.count for merge in earlier]
    if not isinstance(weights, str):
        name: Literal["uniform", "linear", "decay", "given"] = "given"
        if len(weights) != len(checkpoints):
            raise UsageError(
                f"there are {len(weights)} weights for {len(checkpoints)} checkpoints",
                where="--weights",
                fix="give one number a checkpoint, in their order",
            )
        total = float(sum(weights))
        if min(weights) < 0 or not 0 < total < float("inf"):
            raise UsageError(
                "the weights are no weights of a mean",
                where="--weights",
                fix="give numbers from 0 on, one of them above 0",
            )
        found = [weight / total for weight in weights]
    elif weights == "uniform":
        name, found = weights, [count / sum(counts) for count in counts]
    else:
        name = weights
        if any(merge is not None for merge in earlier):
            raise UsageError(
                f"a checkpoint that is a merge has no one step for `{weights}`",
                where="--weights",
                fix="merge the checkpoints themselves, or give numbers",
            )
        steps = [checkpoint.step for checkpoint in checkpoints]
        if steps != sorted(steps):
            raise UsageError(
                f"`{weights}` counts by step, and the checkpoints are of the steps "
                + ", ".join(f"{step:,}" for step in steps),
                where="--weights",
                fix="give the checkpoints in the order of their steps",
            )
        found = shares(weights, len(checkpoints))
    firsts = [c.step if m is None else m.first for c, m in zip(checkpoints, earlier, strict=True)]
    of = tuple(
        MergedFrom(step=c.step, digest=c.manifest.digest, share=share)
        for c, share in zip(checkpoints, found, strict=True)
    )
    last = max(checkpoint.step for checkpoint in checkpoints)
    return found, Merge(weights=name, first=min(firsts), last=last, count=sum(counts), of=of)


def merge_checkpoints(
    checkpoints: Sequence[Checkpoint],
    weights: Weighting | Sequence[float],
    output: str | os.PathLike[str],
) -> tuple[str, Merge]:
    """Write the weighted mean of several checkpoints' weights as a checkpoint without optimiser.

    Each tensor is summed in fp64 and rounded once. Configuration, lock and tokenizer are those of
    the last checkpoint given.

    Args:
        checkpoints: of one model, verified, at least one.
        weights: a name, or a number for each checkpoint.
        output: folder to make, local or remote; its name is none of a run's checkpoints.

    Returns:
        The folder, and what it is a mean of.

    Raises:
        UsageError: see `parts`.
        ValidationError: the checkpoints are of different models or tokenizers.
        ConflictError: another checkpoint is there.
        ResourceError, StorageError: it cannot be written.
    """
    found, merge = parts(checkpoints, weights)
    _refuse_others(checkpoints)
    place = absolute(os.fspath(output)).rstrip("/")
    _refuse_used(place)
    last = checkpoints[-1]
    own = folder_of_paths(last)
    if own != place.rpartition("/")[0]:
        merge = msgspec.structs.replace(merge, paths_from=relative_path(own, place))
    read = {name: last.read_bytes(name) for name in (CONFIG, LOCK, TOKENIZER)}
    documents = {name: data for name, data in read.items() if data is not None}
    state = msgspec.structs.replace(last.state, callbacks={}, step=merge.last)
    where, _, name = place.rpartition("/")
    contents = Contents(
        step=merge.last,
        kind=Kind.fixed,
        state=lambda folder: _write(checkpoints, found, folder),
        documents={STATE: state.encode(), MERGE: merge.encode(), **documents},
        lock_digest=last.manifest.lock_digest,
        name=name,
    )
    with scratch() as work:
        return save_checkpoint(where, contents, World(), work_dir=work), merge


def _refuse_used(place: str) -> None:
    """Refuse an output that would take the place of something else than the same merge."""
    store = Store(place)
    if step_of(place.rpartition("/")[2]) is not None:
        raise UsageError(
            "the output has the name of a checkpoint that a run goes on from",
            where=place,
            why="merged weights come without an optimiser",
            fix=f"give another name, such as {place.rpartition('/')[2]}-merged",
        )
    if next(iter(store.entries()), None) is None:
        return
    try:
        CheckpointManifest.read(store)
    except OlmError as error:
        raise ConflictError(
            "there is something else in the output already",
            where=place,
            why=error.what,
            fix="give a folder that is not there yet",
        ) from error


def _refuse_others(checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse weights that are not of one model, each in its place."""
    first = checkpoints[0]
    for other in checkpoints[1:]:
        wrong = []
        shapes = [
            {n: (e.shape, e.dtype) for n, e in c.index.tensors.items() if _is_of_model(n)}
            for c in (first, other)
        ]
        if shapes[0] != shapes[1] or first.config["model"] != other.config["model"]:
            wrong.append("model")
        rules = [_tokenizer(checkpoint) for checkpoint in (first, other)]
        if rules[0] != rules[1]:
            wrong.append("tokenizer")
        if wrong:
            raise ValidationError(
                f"the checkpoints are not of one {' and '.join(wrong)}",
                where=f"{first.folder}, {other.folder}",
                why="a mean of their weights would be no model",
                fix="merge checkpoints of one run, or of runs of one model on one tokenizer",
            )


def _tokenizer(checkpoint: Checkpoint) -> str | None:
    data = checkpoint.read_bytes(LOCK)
    return None if data is None else Lock.decode(data, checkpoint.folder).tokenizer.sha256


def _write(checkpoints: Sequence[Checkpoint], found: Sequence[float], folder: Path) -> None:
    """Write the tensors of the mean and their index, one tensor at a time."""
    last = checkpoints[-1].index
    entries = {name: last.tensors[name] for name in sorted(last.tensors) if _is_of_model(name)}
    boxes = [
        Box(name, entry.torch_dtype, entry.shape, (0,) * len(entry.shape))
        for name, entry in entries.items()
        if entry.elements
    ]
    with TensorsFile(folder / tensors_file(0), boxes) as file:
        pieces = [file.add(_mean(checkpoints, found, box.tensor)) for box in boxes]
    wholes = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    values = {name: value for name, value in last.values.items() if _is_of_model(name)}
    write_durable(folder / INDEX_NAME, index_of(pieces, wholes, values).encode())


def _is_of_model(name: str) -> bool:
    return name.startswith("model.")


def _mean(checkpoints: Sequence[Checkpoint], found: Sequence[float], name: str) -> Tensor:
    """Return a tensor of the mean; one of whole numbers is that of the last checkpoint."""
    entry = checkpoints[-1].index.tensors[name]
    one = torch.empty(entry.shape, dtype=entry.torch_dtype)
    if not one.is_floating_point():
        fill({name: one}, checkpoints[-1].tensors, checkpoints[-1].index)
        return one
    total = torch.zeros(entry.shape, dtype=torch.float64)
    for checkpoint, share in zip(checkpoints, found, strict=True):
        fill({name: one}, checkpoint.tensors, checkpoint.index)
        total.add_(one, alpha=share)
    return one.copy_(total)
