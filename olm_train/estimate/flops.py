"""Floating-point work of a training step.

A token costs 6 FLOPs per parameter of every matrix it is multiplied with (2 forward, 4 backward;
the head counts; the embedding look-up and the experts that it does not pass do not), plus
attention: each part says its own (`flops`). Attention counts the query-key pairs that exist under
the causal, per-document mask and no others:

    pairs of a document of n tokens = n (n + 1) / 2 = sum of (position + 1)
    pairs of a layer with a window  = sum of min(position + 1, window)
    FLOPs of a pair = 12 * layers * heads * head_dim        (q.k and p.v, 2 each, times 3)

Where layers differ in their window, pairs are the mean over the layers. Rows that pad the
vocabulary are not work either.

Recomputation is not work in this sense.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from olm_train.model.attention_backend import pairs_of
from olm_train.model.config import DecoderConfig

if TYPE_CHECKING:
    from olm_train.data.loader import DataLoader


def num_flops_per_token(config: DecoderConfig, *, pairs_per_token: float) -> float:
    """FLOPs of forward and backward for one token.

    Args:
        config: shape of the model.
        pairs_per_token: mean number of keys a query sees: `document_pairs` or `attention_pairs`
            of the documents in a batch, divided by its tokens.
    """
    attention = config.n_layers * config.attention.flops(config, config.norm)
    feed_forward = sum(part.flops(config) for part in config.feed_forwards)
    matrices = attention + feed_forward + 6 * config.vocab_size * config.d_model
    return matrices + config.n_layers * config.attention.pair_flops(config) * pairs_per_token


def document_pairs(config: DecoderConfig, length: int) -> float:
    """Query-key pairs of a document of `length` tokens, mean over the layers."""
    return sum(pairs_of(length, window) for window in config.windows) / config.n_layers


def flops_of_steps(config: DecoderConfig, loader: DataLoader, steps: range) -> float:
    """FLOPs of some steps of a run, counted from 0; documents as long as a row of their phase."""
    total = 0.0
    for phase in loader.phases():
        first, stop = max(phase.first, steps.start), min(phase.stop, steps.stop)
        if first < stop:
            pairs = document_pairs(config, phase.sequence_length) / phase.sequence_length
            tokens = loader.tokens_before(stop) - loader.tokens_before(first)
            total += tokens * num_flops_per_token(config, pairs_per_token=pairs)
    return total


def attention_pairs(config: DecoderConfig, positions: Tensor) -> Tensor:
    """Query-key pairs of a micro-batch, mean over the layers, rounded down.

    Args:
        config: shape of the model.
        positions: int [b, S], restarting at 0 at each document.

    Returns:
        int64 scalar on the device of `positions`.
    """
    seen = positions + 1
    total = positions.new_zeros((), dtype=torch.int64)
    for window, layers in Counter(config.windows).items():
        pairs = seen if window is None else seen.clamp(max=window)
        total = total + layers * pairs.sum(dtype=torch.int64)
    return total // config.n_layers
