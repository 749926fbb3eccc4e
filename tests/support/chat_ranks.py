"""What each of some ranks does for tests/olm_train/test_chat_training.py; by name."""

from __future__ import annotations

from pathlib import Path

import torch
from support.runs import group_world
from support.training import build, full

from olm_train.data import DataLoader
from olm_train.distributed.world import World
from olm_train.model.config import DecoderConfig

MODEL = DecoderConfig(
    vocab_size=64, d_model=32, n_layers=1, n_heads=2, feed_forward={"hidden_size": 32}
)
Steps = tuple[list[tuple[float, int]], dict[str, torch.Tensor], list[int]]
"""Loss and labels of each step, the weights after them, and this rank's own labels."""


def steps_on_ranks(lock: str, micro_rows: int) -> Steps:
    return steps(lock, micro_rows, group_world())


def steps(lock: str, micro_rows: int, world: World) -> Steps:
    """Train on a mixture of rows of 16 tokens, 4 a step, in micro-batches of some rows."""
    module = build(world=world, model=MODEL, rank_microbatch_size=micro_rows * 16)
    seen, own = [], []
    with DataLoader(
        Path(lock),
        global_batch_size=64,
        rank_microbatch_size=micro_rows * 16,
        rank=world.rank,
        world_size=world.size,
        prefetch=0,
    ) as loader:
        for step, batches in enumerate(loader, 1):
            own.append(sum(int((batch.labels >= 0).sum()) for batch in batches))
            found = module.train_step(batches, step, loader.steps)
            seen.append((float(found["train/CE loss"]), int(found["train/labels"])))
    return seen, full(module)["model"], own
