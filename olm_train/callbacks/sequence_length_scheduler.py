"""A warm-up of the sequence length: short rows at first, the mixture's own ones at its end.

    micro-batches of a step -> rows cut into shorter ones, each token trained      (truncate: false)
                            -> the first tokens of each row, the others left out   (truncate: true)

What a step has depends on its number alone, so a resumed run and a repeated step have the same.

A micro-batch with shorter rows: each row cut into parts, or the end of each row left out.

Nothing is read from the device: shapes depend on shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from olm_data.config.hints import Needs, PositiveInt
from olm_data.errors import UsageError
from olm_data.run_log.metric_names import TRUNCATED
from olm_train.callbacks.base import Callback
from olm_train.data.base import require_lock
from olm_train.data.batch import Batch


def split_rows(batch: Batch, length: int) -> Batch:
    """Return the same tokens and labels in rows of `length`; each part begins a new piece.

    As the loader gives a stage of that sequence length, but for how much the offsets are padded.

    Args:
        length: divides the length of the rows.
    """
    rows, now = batch.input_ids.shape
    shape = (rows * now // length, length)
    cuts = torch.arange(
        0, rows * now + 1, length, dtype=batch.cu_seqlens.dtype, device=batch.cu_seqlens.device
    )
    return replace(
        batch,
        input_ids=batch.input_ids.reshape(shape),
        labels=batch.labels.reshape(shape),
        cu_seqlens=_once(torch.cat([batch.cu_seqlens, cuts]), rows * now),
        max_seqlen=length,
        rows=batch.rows.repeat_interleave(now // length),
    )


def truncate_rows(batch: Batch, length: int) -> Batch:
    """Return the first `length` tokens of each row, with their labels; the others are left out."""
    rows, now = batch.input_ids.shape
    row, place = batch.cu_seqlens // now, batch.cu_seqlens % now
    return replace(
        batch,
        input_ids=batch.input_ids[:, :length].contiguous(),
        labels=batch.labels[:, :length].contiguous(),
        cu_seqlens=_once(row * length + place.clamp(max=length), rows * length),
        max_seqlen=length,
    )


def _once(offsets: Tensor, end: int) -> Tensor:
    """Return offsets int32 [n] in order, each once, the end repeated in place of the others."""
    offsets = offsets.sort().values
    again = torch.zeros_like(offsets, dtype=torch.bool)
    again[1:] = offsets[1:] == offsets[:-1]
    return offsets.masked_fill(again, end).sort().values


NAME = "sequence_length_scheduler"
MULTIPLE = 128


@dataclass(kw_only=True)
class SequenceLengthSchedulerCallback(Callback):
    """Raises the sequence length in a straight line over `warmup_steps`, in whole lengths.

    Where the model is compiled, each length is compiled once.

    Attributes:
        enabled: warm up, where `sequence_length_scheduler` is given at all.
        min_sequence_length: tokens of a row at the first step.
        warmup_steps: steps until rows have the mixture's own length.
        truncate: leave the end of each row out, instead of cutting it into rows of their own; what
            is left out is logged as `train/truncated tokens`, and counts as trained elsewhere.
        keep_multiple_of: lengths are multiples of it; without, they are `min_sequence_length`
            times a power of 2, and so is the mixture's.
    """

    enabled: bool = True
    min_sequence_length: PositiveInt = 128
    warmup_steps: PositiveInt = 2000
    truncate: bool = False
    keep_multiple_of: Annotated[PositiveInt, Needs("truncate")] = MULTIPLE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.truncate and self.min_sequence_length < self.keep_multiple_of:
            raise UsageError(
                f"{self.min_sequence_length} is below keep_multiple_of {self.keep_multiple_of}",
                where="min_sequence_length",
                fix="the first length is a multiple of it too",
            )
        self._length: int | None = None  # of the rows of the last step
        self._left_out = 0

    def explicit_steps(self) -> dict[str, list[int]]:
        return {"warmup_steps": [self.warmup_steps]}

    def post_attach(self) -> None:
        lock = require_lock(self.trainer.data_loader, f"the callback {NAME}")
        self._full = lock.sequence_length
        if self._full <= self.min_sequence_length:
            raise UsageError(
                f"{self.min_sequence_length:,} is not below the sequence length of the mixture, "
                f"{self._full:,}",
                where=f"trainer.callbacks.{NAME}.min_sequence_length",
            )
        if self.truncate:
            if self.trainer.world.sharers > 1:
                raise UsageError(
                    "rows cannot be truncated where ranks share them (cp_config and tp_config of "
                    "train_module)",
                    where=f"trainer.callbacks.{NAME}.truncate",
                    why="what is left may not divide into equal parts",
                    fix="leave truncate out: the rows are cut into shorter ones",
                )
            return
        for length in lock.sequence_lengths:
            parts, rest = divmod(length, self.min_sequence_length)
            if length > self.min_sequence_length and (rest or parts & (parts - 1)):
                raise UsageError(
                    f"the sequence length {length:,} is not {self.min_sequence_length:,} times a "
                    "power of 2",
                    where=f"trainer.callbacks.{NAME}.min_sequence_length",
                    fix="give a length that is, or truncate: true",
                )

    def pre_train(self) -> None:
        self._length = None

    def length_at(self, step: int) -> int:
        """Return the tokens of a row in a step, counted from 1."""
        least, done = self.min_sequence_length, min(step, self.warmup_steps)
        line = least + (self._full - least) * done // self.warmup_steps
        if self.truncate:
            return line // self.keep_multiple_of * self.keep_multiple_of
        power: int = 1 << ((line // least).bit_length() - 1)
        return least * power

    def change_batches(self, batches: Sequence[Any]) -> Sequence[Any]:
        step, self._left_out = self.trainer.step + 1, 0
        if step > self.warmup_steps:
            return batches
        length = self.length_at(step)
        if length != self._length:
            self.trainer.say(f"the sequence length is {length:,} from step {step:,}")
            self._length = length
        return [self._cut(batch, length) for batch in batches]

    def post_step(self) -> None:
        if self.truncate and self.trainer.step <= self.warmup_steps:
            # Every rank has as many rows.
            self.trainer.record_metric(TRUNCATED, self._left_out * self.trainer.world.size)

    def _cut(self, batch: Batch, length: int) -> Batch:
        rows, now = batch.input_ids.shape
        if length >= now:
            return batch
        if not self.truncate:
            return split_rows(batch, length)
        self._left_out += rows * (now - length)
        return truncate_rows(batch, length)
