"""Row 49, loader: through real batches every row once an epoch, every prefix the mixture wanted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.small_datasets import write_mixture

from olm_train.data import DataLoader

S = 4
EPOCHS = 12


def numbered(rows: int, first: int) -> list[list[np.ndarray]]:
    """A source whose row r starts with token first + r; its documents have 3 tokens."""
    tokens = np.zeros(rows * S + 1, np.uint32)
    tokens[: rows * S : S] = first + np.arange(rows)
    documents = np.split(tokens, range(3, len(tokens), 3))
    half = len(documents) // 2
    return [documents[:half], documents[half:]]


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
def test_every_epoch_reads_every_row_once(tmp_path: Path, rows: int) -> None:
    lock = write_mixture(
        tmp_path,
        {"a": numbered(rows, 1)},
        stages=[(EPOCHS * rows * S, {"a": 1})],
        sequence_length=S,
    )
    for world, micro in ((1, 1), (2, 3), (4, 1)):
        first_tokens = np.concatenate(read_all(lock, world, micro, global_rows=12))
        assert len(first_tokens) == EPOCHS * rows
        for epoch in range(EPOCHS):
            seen = np.sort(first_tokens[epoch * rows : (epoch + 1) * rows])
            np.testing.assert_array_equal(seen, 1 + np.arange(rows))


def read_all(lock: Path, world: int, micro: int, global_rows: int) -> list[np.ndarray]:
    """First tokens of all rows in global order, as `world` ranks hand them out."""
    ranks = [
        DataLoader(
            lock,
            global_batch_size=global_rows * S,
            rank_microbatch_size=micro * S,
            rank=rank,
            world_size=world,
        )
        for rank in range(world)
    ]
    return [
        batch.input_ids[:, 0].numpy()
        for steps in zip(*ranks, strict=True)
        for batches in steps
        for batch in batches
    ]
