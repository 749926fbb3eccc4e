"""One micro-batch as fixed-shape tensors: what the loader hands out and the model takes in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from olm_data.errors import ValidationError
from olm_data.rows.reader import RowBatch
from olm_train.model.attention_backend import MAX_DOCUMENTS

ROOMS = (256, 1024, 4096, 16_384, MAX_DOCUMENTS)
"""Numbers of pieces that the offsets of a micro-batch have room for: few, so that few are compiled.

Beyond the last one there is as much room as the reader gives, and kernels that take no more than
that refuse the micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A micro-batch of b rows of S tokens. Shapes change only where the sequence length does.

    But for the offsets, which have few.

    A stage with a shorter sequence length has more and shorter rows: b * S stays the same.

    Attributes:
        input_ids: int64 [b, S].
        labels: int64 [b, S]; -100 where the next token belongs to another document (or is padding).
        doc_start: int32 [b, S]; place within the row of the first token of the token's piece.
        positions: int32 [b, S]; place within the piece: restarts at 0 at each document.
        cu_seqlens: int32 [n + 1]; offsets of the pieces over the flattened micro-batch, padded by
            repeating b * S to one of few sizes n, see `ROOMS`.
        max_seqlen: S, the longest a piece can be.
        rows: int64 [b]; global row ids of the schedule (-1 for a row of padding). Rows that are
            parts of the same row of the schedule have its id.
    """

    input_ids: Tensor
    labels: Tensor
    doc_start: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    rows: Tensor

    @classmethod
    def from_rows(cls, rows: RowBatch) -> Batch:
        """Wrap the arrays of a `RowBatch` without copying them.

        Raises:
            ValidationError: the offsets are not ones an attention kernel can be given.
        """
        check_offsets(rows.cu_seqlens, rows.input_ids.size, rows.max_seqlen)
        return cls(
            input_ids=torch.from_numpy(rows.input_ids),
            labels=torch.from_numpy(rows.labels),
            doc_start=torch.from_numpy(rows.doc_start),
            positions=torch.from_numpy(rows.positions),
            cu_seqlens=torch.from_numpy(fitted(rows.cu_seqlens)),
            max_seqlen=rows.max_seqlen,
            rows=torch.from_numpy(rows.rows),
        )

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on `device`; the copy runs in the background if the memory is pinned."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory (needs CUDA)."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = change(value)
        return Batch(**values)


def fitted(cu_seqlens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the offsets with the padding cut to the next of `ROOMS`, without copying them.

    Kernels start blocks for each document, empty ones too: padded to what a micro-batch can hold at
    most, they would be millions.
    """
    pieces = int(np.searchsorted(cu_seqlens, cu_seqlens[-1]))
    room = next((room for room in ROOMS if room >= pieces), len(cu_seqlens) - 1)
    return cu_seqlens[: room + 1]


def check_offsets(cu_seqlens: NDArray[np.int32], tokens: int, max_seqlen: int) -> None:
    """Check document offsets while they are on the CPU, in the loader's thread.

    Attention kernels trust them: wrong ones are read as they are, beyond the end of the tensors or
    into the next document, and nothing is said.

    Args:
        cu_seqlens: int32 [n], offsets over the flattened micro-batch.
        tokens: of the micro-batch.
        max_seqlen: the longest a document may be.

    Raises:
        ValidationError: they do not begin at 0, fall, do not end at `tokens`, or are too far apart.
    """
    lengths = np.diff(cu_seqlens)
    faults = {
        "they do not begin at 0": len(cu_seqlens) < 1 or cu_seqlens[0] != 0,
        f"they do not end at the {tokens:,} tokens of the micro-batch": (
            len(cu_seqlens) > 0 and cu_seqlens[-1] != tokens
        ),
        "one is smaller than the one before": (lengths < 0).any(),
        f"a document is longer than {max_seqlen:,}": (lengths > max_seqlen).any(),
    }
    wrong = [what for what, found in faults.items() if found]
    if wrong:
        raise ValidationError(
            "the document offsets of a micro-batch are wrong",
            where=f"cu_seqlens {cu_seqlens.tolist()[:8]}...",
            why="; ".join(wrong),
        )
