"""Merged weights as a checkpoint: `merge.json` says what they are the mean of.

    step00000500-merged/   beside the checkpoints of a run, by a callback
    FOLDER                 of several checkpoints, by `olm-train merge`

It has a model and no optimiser: `generate`, `evaluate` and `export` read it as any checkpoint, a
run can begin with its weights, and none goes on from it.
"""

from __future__ import annotations

import os
from typing import Literal

import msgspec

from olm_data.bounded_json import Size
from olm_data.decoding import convert
from olm_data.errors import ValidationError
from olm_data.printing import Share
from olm_data.storage.store import is_remote
from olm_train.checkpoint.documents import encoded
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.manifest import MERGE

FORMAT, VERSION = "olm-merge", 1


class MergedFrom(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was merged: its step, the digest of its manifest, what it counts of 1."""

    step: Size
    digest: str
    share: Share


class Merge(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `merge.json`.

    Attributes:
        weights: how they were weighted; `given`: by numbers.
        first, last: steps of the first and last weights in the mean.
        count: how many weights the mean is of: steps, or checkpoints.
        decay: of an `ema`.
        of: the checkpoints, where it is made of such.
        paths_from: folder that local paths in its `config.json` count from, itself seen from the
            merge; left out where that is the folder it lies in, as of a run's checkpoints.
    """

    format: str = FORMAT
    version: int = VERSION
    weights: Literal["uniform", "linear", "decay", "given", "ema"]
    first: Size
    last: Size
    count: Size
    decay: float | None = None
    of: tuple[MergedFrom, ...] = ()
    paths_from: str | msgspec.UnsetType = msgspec.UNSET

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return encoded(msgspec.to_builtins(self))


def merge_of(checkpoint: Checkpoint) -> Merge | None:
    """Return what a checkpoint is a merge of, None of one that a step left.

    Raises:
        ValidationError: its `merge.json` is malformed, or of another version.
    """
    value = checkpoint.read_json(MERGE)
    if value is None:
        return None
    try:
        merge = convert(value, Merge)
        if (merge.format, merge.version) == (FORMAT, VERSION) and merge.count:
            return merge
        why = f"it is {merge.format} version {merge.version} of {merge.count} weights"
    except msgspec.ValidationError as error:
        why = str(error)
    raise ValidationError(
        f"{MERGE} is not what this program writes",
        where=checkpoint.folder,
        why=why[:200],
    )


def folder_of_paths(checkpoint: Checkpoint) -> str:
    """Return the folder that local paths in the `config.json` of a checkpoint count from.

    Raises:
        ValidationError: see `merge_of`.
    """
    merge = merge_of(checkpoint)
    if merge is None or merge.paths_from is msgspec.UNSET:
        return checkpoint.folder.rpartition("/")[0]
    if is_remote(merge.paths_from) or is_remote(checkpoint.folder):
        return merge.paths_from
    return os.path.normpath(os.path.join(checkpoint.folder, merge.paths_from))
