"""Row 30, loader: a flipped bit is found when its block is first read, and names the shard."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from support.small_datasets import random_shards, write_mixture

from olm_data.dataset.record import BLOCK_BYTES, HEADER_BYTES
from olm_data.errors import ValidationError
from olm_train.data import DataLoader, EvalLoader

S, TOKENS = 512, 100_000  # shards of more than three blocks each


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    sources = {"a": random_shards(0, [[1000] * (TOKENS // 1000)] * 2)}
    return write_mixture(
        tmp_path, sources, stages=[(150_000, {"a": 1})], sequence_length=S, dtypes={"a": "uint16"}
    )


def flip(path: Path, byte: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        value = os.pread(file.fileno(), 1, byte)[0]
        os.pwrite(file.fileno(), bytes([value ^ (1 << bit)]), byte)


def first_step_that_reads(lock: Path, shard: int, block: int) -> int:
    """The first step whose rows touch a block of a shard's tokens file."""
    loader = open_loader(lock)
    low = (block * BLOCK_BYTES - HEADER_BYTES) // 2 + shard * TOKENS
    high = low + BLOCK_BYTES // 2
    for step in range(loader.steps):
        place = loader.lock.schedule().locate(loader.rows_of_step(step))
        if np.any((place.row * S + S + 1 > low) & (place.row * S < high)):
            return step
    raise AssertionError("no step reads the block")


def open_loader(lock: Path, verify: str = "lazy") -> DataLoader:
    return DataLoader(
        lock, global_batch_size=4 * S, rank_microbatch_size=2 * S, prefetch=3, verify=verify
    )


@pytest.mark.parametrize("bit", range(8))
def test_the_step_that_first_reads_the_block_fails_and_no_earlier_one(lock: Path, bit: int) -> None:
    flip(lock.parent / "a" / "shard-00001.tokens.npy", 2 * BLOCK_BYTES + 777, bit)
    bad = first_step_that_reads(lock, shard=1, block=2)
    loader = open_loader(lock)
    steps = iter(loader)
    for _ in range(bad):
        next(steps)
    with pytest.raises(ValidationError, match="have changed") as caught:
        next(steps)
    assert "shard-00001.tokens.npy" in str(caught.value.where)
    assert loader.state_dict()["rows_consumed"] == bad * 4  # that of the last good step


def test_full_verification_finds_it_when_the_shard_is_opened(lock: Path) -> None:
    for shard in (0, 1):
        flip(lock.parent / "a" / f"shard-0000{shard}.tokens.npy", HEADER_BYTES + 1)
    with pytest.raises(ValidationError, match="have changed"):
        next(iter(open_loader(lock, verify="full")))


def test_without_verification_tokens_pass_and_ends_do_not_leave_the_shard(lock: Path) -> None:
    flip(lock.parent / "a" / "shard-00001.tokens.npy", HEADER_BYTES + 1)
    assert sum(1 for _ in open_loader(lock, verify="off")) == open_loader(lock).steps


def test_evaluation_finds_it_too(lock: Path) -> None:
    flip(lock.parent / "a" / "shard-00001.tokens.npy", 2 * BLOCK_BYTES + 777)
    with pytest.raises(ValidationError, match="have changed"):
        list(EvalLoader(lock.parent / "a", S, 4 * S))
