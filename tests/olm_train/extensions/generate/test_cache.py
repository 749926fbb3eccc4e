"""What is kept: the last keys of a window, in rows as long as their texts."""

from __future__ import annotations

import torch
from torch import Tensor

from olm_train.extensions.generate.cache import KVCache, LayerCache
from olm_train.model.attention_backend import Scores


def own(q: Tensor, k: Tensor, v: Tensor, context: object, scores: Scores) -> Tensor:
    return q


def tokens(numbers: list[int]) -> Tensor:
    """Keys [1, T, 1, 2] that hold the number of their token."""
    return torch.tensor(numbers, dtype=torch.float32)[None, :, None, None].expand(1, -1, 1, 2)


def test_a_window_keeps_its_last_keys_in_a_ring() -> None:
    cache = KVCache([3, None], torch.device("cpu"))
    for context in cache.prefill([5, 2], [None, None]):
        k = tokens([0, 1, 2, 3, 4, 10, 11])
        context.attend(own, k, k, k, Scores())
    ring, whole = cache._layers
    assert ring.keys is not None
    assert whole.keys is not None
    assert ring.keys.shape == (2, 1, 3, 2)
    assert ring.keys[:, 0, :, 0].tolist() == [[3, 4, 2], [10, 11, 0]]
    assert whole.keys[:, 0, :, 0].tolist() == [[0, 1, 2, 3, 4], [10, 11, 0, 0, 0]]
    for context in cache.decode():
        k = tokens([5, 12]).transpose(0, 1)  # [2, 1, 1, 2]
        context.attend(own, k, k, k, Scores())
    assert ring.keys[:, 0, :, 0].tolist() == [[3, 4, 5], [10, 11, 12]]
    assert cache.lengths == [6, 3]
    cache.remove(0)
    assert cache.lengths == [3]
    assert ring.keys[0, 0, :, 0].tolist() == [10, 11, 12]


def test_room_doubles_and_a_ring_stays_as_large_as_its_window() -> None:
    like = torch.zeros(1, 2, 4)
    sizes = {}
    for window in (None, 6):
        layer = LayerCache(window)
        sizes[window] = [layer.reserve(like, 1, n)[0].shape[2] for n in (3, 4, 5, 6, 7, 30)]
    assert sizes == {None: [3, 6, 6, 6, 12, 30], 6: [3, 6, 6, 6, 6, 6]}
    assert layer.reserve(like, 3, 1)[0].shape == (3, 2, 6, 4)
