"""A micro-batch with shorter rows: each row cut into parts, or the end of each row left out.

Nothing is read from the device: shapes depend on shapes alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from olm_train.data.batch import Batch


def split_rows(batch: Batch, length: int) -> Batch:
    """Return the same tokens and labels in rows of `length`; each part begins a new piece.

    As the loader gives a stage of that sequence length, but for how much the offsets are padded.

    Args:
        length: divides the length of the rows.
    """
    rows, now = batch.input_ids.shape
    shape = (rows * now // length, length)
    places = torch.arange(rows * now, dtype=torch.int32, device=batch.positions.device) % length
    positions = torch.minimum(batch.positions.flatten(), places)
    cuts = torch.arange(
        0, rows * now + 1, length, dtype=batch.cu_seqlens.dtype, device=batch.cu_seqlens.device
    )
    return replace(
        batch,
        input_ids=batch.input_ids.reshape(shape),
        labels=batch.labels.reshape(shape),
        doc_start=(places - positions).reshape(shape),
        positions=positions.reshape(shape),
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
        doc_start=batch.doc_start[:, :length].contiguous(),
        positions=batch.positions[:, :length].contiguous(),
        cu_seqlens=_once(row * length + place.clamp(max=length), rows * length),
        max_seqlen=length,
    )


def _once(offsets: Tensor, end: int) -> Tensor:
    """Return offsets int32 [n] in order, each once, the end repeated in place of the others."""
    offsets = offsets.sort().values
    again = torch.zeros_like(offsets, dtype=torch.bool)
    again[1:] = offsets[1:] == offsets[:-1]
    return offsets.masked_fill(again, end).sort().values
