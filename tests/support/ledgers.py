"""A ledger as a run of two ranks leaves it, of losses that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from olm_data.extensions.ledger.files import Entries, LedgerInfo, LedgerWriter

Piece = tuple[str, int, int, int, int, float]
"""Source, document, start, epoch, labels, nats a label."""


def write_ledger(folder: Path, steps: dict[int, Sequence[Piece]], *, rank: int = 0) -> None:
    """Write the pieces of some steps, two steps a file, as rank `rank` of 2."""
    info = LedgerInfo(rank=rank, world_size=2, lock="d")
    writer = LedgerWriter(folder, info, steps_per_file=2, max_rows=1000)
    for step, pieces in steps.items():
        source, document, start, epoch, labels, loss = zip(*pieces, strict=True)
        writer.add(
            Entries(
                step=step,
                row=np.arange(len(pieces)) + 100 * step,
                source=source,
                shard=["s"] * len(pieces),
                document=np.array(document),
                start=np.array(start),
                stop=np.array(start) + np.array(labels),
                epoch=np.array(epoch),
                tokens=np.array(labels),
                nats=np.array(loss) * np.array(labels),
            )
        )
    writer.flush()
