"""Micro-batches made from document lengths, for tests of the model and the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from olm_train.data.batch import Batch


def make_batch(lengths: Sequence[Sequence[int]], *, vocab_size: int, seed: int = 0) -> Batch:
    """One micro-batch of random tokens.

    Args:
        lengths: for each row the lengths of its documents, all rows with the same sum S. The
            label after a document's last token is -100: the next token belongs to another one.
        vocab_size: ids are drawn from 0..vocab_size - 1.
        seed: of the token ids.
    """
    b, s = len(lengths), sum(lengths[0])
    tokens = torch.randint(vocab_size, (b, s), generator=torch.Generator().manual_seed(seed))
    labels = torch.full((b, s), -100)
    offsets = [0]
    for row, documents in enumerate(lengths):
        start = 0
        for length in documents:
            end = start + length
            labels[row, start : end - 1] = tokens[row, start + 1 : end]
            offsets.append(row * s + end)
            start = end
    return Batch(
        input_ids=tokens,
        labels=labels,
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
        max_seqlen=s,
        rows=torch.arange(b) + 1000 * seed,
    )
