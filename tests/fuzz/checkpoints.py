"""The files of a checkpoint as parsers of bytes: each is put into a whole one, digests made good.

bytes -> one file of it -> spelled as the format wants it, digests -> open, index, state, load
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from support.seal import seal

from olm_data.errors import OlmError
from olm_train.checkpoint.documents import encoded
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import INDEX, MANIFEST, STATE, Kind
from olm_train.checkpoint.save import Contents, save_checkpoint
from olm_train.distributed.world import World

TRAIN = {
    "step": 1, "max_steps": 2, "world_size": 1, "global_batch_size": 8,
    "data_loader": {"lock_digest": "ab", "rows_consumed": 8}, "callbacks": {"a": {"b": 1.5}},
}  # fmt: skip


class Checkpoints:
    """A small checkpoint in a folder, and what reads it.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        state = {"model": {"w": torch.ones(4, 3), "b": torch.ones(2)}, "optim": {"step": 3}}
        contents = Contents(
            step=1,
            kind=Kind.final,
            state=state,
            documents={STATE: encoded(TRAIN)},
            lock_digest="ab",
        )
        self.folder = Path(save_checkpoint(folder, contents, World(), work_dir=folder))
        self._whole = {name: (self.folder / name).read_bytes() for name in (INDEX, MANIFEST, STATE)}

    def seed(self, name: str) -> bytes:
        """Return the honest bytes of a file."""
        return self._whole[name]

    def run(self, name: str) -> Callable[[bytes], None]:
        """Return what reads the checkpoint with other bytes in one of its files."""

        def read(data: bytes) -> None:
            for other, whole in self._whole.items():
                (self.folder / other).write_bytes(whole)
            (self.folder / name).write_bytes(_spelled(data, indent=name == MANIFEST))
            with suppress(ValueError, AttributeError, TypeError, KeyError):  # no object: as it is
                seal(self.folder, listed=name != MANIFEST)
            with suppress(OlmError):
                checkpoint = open_checkpoint(self.folder, World())
                assert checkpoint.state.step is not None
                here: Any = {"model": {"w": torch.zeros(4, 3), "b": torch.zeros(2)}}
                checkpoint.load_tensors(here, World())
                assert checkpoint.index.tensors["model.w"].shape == (4, 3)

        return read


def _spelled(data: bytes, *, indent: bool) -> bytes:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return data
    if indent:
        return json.dumps(value, indent=1).encode() + b"\n"
    return msgspec.json.encode(value, order="sorted") + b"\n"
