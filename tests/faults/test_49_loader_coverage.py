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


def test_every_prefix_of_the_batches_holds_each_source_within_a_row_of_its_share(
    tmp_path: Path,
) -> None:
    sizes, weights = {"a": 50, "b": 31, "c": 7}, {"a": 7, "b": 2, "c": 1}
    sources = {name: numbered(rows, 1000 * (i + 1)) for i, (name, rows) in enumerate(sizes.items())}
    lock = write_mixture(tmp_path, sources, stages=[(600 * S, weights)], sequence_length=S)
    drawn = np.concatenate(read_all(lock, world=2, micro=2, global_rows=20)) // 1000 - 1
    assert len(drawn) == 600
    for index, name in enumerate(sources):
        share = np.arange(1, 601) * weights[name] / 10
        assert np.abs(np.cumsum(drawn == index) - share).max() < 1


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
