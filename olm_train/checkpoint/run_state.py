"""`train.json`: what of a run a checkpoint holds beside its tensors.

    RunState --encode--> train.json --decode, `Checkpoint.state`--> RunState

What the loader, the optimiser and the callbacks keep there is theirs: plain values, in the JSON of
`state.to_json`. Fields that older releases did not write have a default.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from olm_data.bounded_json import MalformedJson, Size
from olm_data.errors import printable
from olm_data.order.steps import StepSizes
from olm_train.checkpoint.manifest import STATE
from olm_train.checkpoint.state import from_json
from olm_train.optim.state import OptimizerRecord


class Origin(msgspec.Struct, frozen=True):
    """The checkpoint, or exported weights, of another run that a run began with.

    Attributes:
        path: its folder, from that of the run where both are local.
        step: optimiser steps it was trained.
        digest: of its manifest, or sha256 of the weights.
    """

    path: str
    step: Size
    digest: str


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file.

    Attributes:
        optimizer: what the optimiser keeps beside its tensors.
        step: optimiser steps done.
        max_steps: length of the schedule.
        global_batch_size, batch_size_changes: tokens of each step, see `StepSizes.recorded`.
        world_size: ranks that saved it.
        data_loader: state of the data loader.
        callbacks: state of each callback by name.
        origin: of a run that began with another one's checkpoint.
    """

    optimizer: OptimizerRecord | None = None
    step: int
    max_steps: Size
    global_batch_size: Size
    batch_size_changes: tuple[tuple[int, int], ...] | msgspec.UnsetType = msgspec.UNSET
    world_size: Size
    data_loader: dict[str, Any]
    callbacks: dict[str, Any]
    origin: Origin | None = None

    @property
    def batch_sizes(self) -> StepSizes:
        """Tokens of each step."""
        return StepSizes.recorded(self.global_batch_size, self.batch_size_changes or ())

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return json.dumps(msgspec.to_builtins(self), indent=1).encode() + b"\n"

    @classmethod
    def of(cls, value: Any) -> RunState:
        """Return the state that a decoded file holds.

        Raises:
            MalformedJson: it is not what `encode` writes.
            ValidationError: a value in it is of no known kind.
        """
        try:
            return msgspec.convert(from_json(value, STATE), cls)
        except msgspec.ValidationError as error:
            raise MalformedJson(printable(str(error))[:200]) from None
