"""Log-probabilities of continuations given as ids, packed into rows as a run packs its tasks.

    pairs of ids -> `rows_of` -> rows -> one forward pass each -> logits of the scored places alone
        -> summed by request: nats, and ids that are not the most likely one

Logits in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from olm_data.errors import UsageError
from olm_train.data.batch import Batch
from olm_train.distributed.world import World
from olm_train.extensions.downstream.request_rows import RequestRows
from olm_train.model.decoder import Decoder
from olm_train.model.head import Head
from olm_train.model.loss import IGNORE_INDEX, sum_by_piece
from olm_train.model.precision import at_least_fp32

CHUNK = 1024
"""Tokens whose logits exist at a time."""

Pair = tuple[list[int], list[int]]
"""Ids of a context, at least one, and of its continuation, at least one."""
Answer = tuple[float, bool]
"""Log-probability of a continuation in nats, and whether each of its ids is the most likely one."""
Keep = Callable[[int, Answer], None]
"""Told the number of a pair and its answer as soon as it is known."""


def rows_of(pairs: Sequence[Pair], max_length: int, rows: int, device: torch.device) -> RequestRows:
    """Return pairs in rows.

    Args:
        max_length: tokens that the model looks at.
        rows: of a batch.

    Raises:
        UsageError: a continuation is longer than that.
    """
    context = np.array([len(a) for a, _ in pairs], np.int64)
    sizes = np.array([len(a) + len(b) for a, b in pairs], np.int64)
    # no longer than all of them together: a few short ones make no row of a long context
    length = min(max_length, int((sizes - 1).sum()))
    found = RequestRows(
        np.fromiter((token for pair in pairs for ids in pair for token in ids), np.int64),
        sizes.cumsum(),
        context,
        length,
        rows * length,
        world=World(device=device),
    )
    if found.cut.any():
        longest = int((sizes - context).max())
        raise UsageError(
            f"a continuation has {longest:,} tokens, and the model looks at {max_length:,}",
            why="it cannot be scored as a whole",
            fix="leave the task out",
        )
    return found


def answers(
    model: Decoder,
    rows: RequestRows,
    device: torch.device,
    keep: Keep | None = None,
    *,
    quiet: bool = False,
) -> list[Answer]:
    """Return the answers of requests, in their order; `quiet`: without a progress bar."""
    found: list[Answer] = [(0.0, False)] * rows.requests
    with tqdm(total=rows.requests, desc="Scoring requests", disable=quiet) as bar:
        for batch, members, offsets in rows:
            sums = _sums(model, batch.to(device), torch.from_numpy(offsets).to(device))
            for request, nats, misses in zip(members.tolist(), *sums.tolist(), strict=True):
                if request < 0:
                    continue
                found[request] = (-nats, misses == 0)
                if keep is not None:
                    keep(request, found[request])
                bar.update()
    return found


@torch.no_grad()
def _sums(model: Decoder, batch: Batch, offsets: Tensor) -> Tensor:
    """Return nats, and ids that are not the most likely one, of each piece: fp64 [2, pieces]."""
    labels = batch.labels.flatten()  # [b * S]
    scored = (labels != IGNORE_INDEX).nonzero()[:, 0]

    def reduce(head: Head, x: Tensor) -> Tensor:
        head, x = head._replace(weight=at_least_fp32(head.weight)), at_least_fp32(x)
        states = x.flatten(0, -2)[scored]  # [n, d_model]
        both = torch.zeros(2, len(labels), device=x.device)
        for places, part in zip(scored.split(CHUNK), states.split(CHUNK), strict=True):
            logits, wanted = head.logits(part), labels[places]  # [n, V], [n]
            both[0, places] = F.cross_entropy(logits, wanted, reduction="none")
            both[1, places] = (logits.argmax(dim=-1) != wanted).float()
        return both

    both = batch.through(model, reduce)
    return torch.stack([sum_by_piece(each, labels, offsets)[0] for each in both]).cpu()
