"""Keys and values of the texts that are being written, so that no token is computed twice.

    prompts, packed in one row of their own documents --prefill--> keys, values of each layer
    more of a long prompt, [1, n] ---------------------extend----> attends to what came before too
    one new token of each text, [R, 1] ----------------decode---> attends to those of its own text

A text has a row of its own, as long as it is: prompts are neither padded nor moved. A layer with a
window of w tokens keeps the last w keys in a ring: position p lies at p modulo w. Keys are kept as
they are after rotation, so their order in the ring is of no account.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from olm_train.model.attention_backend import Attend, KeySource, Scores, keys_before
from olm_train.model.attention_dense import attention_by_products

T = TypeVar("T")


class Places(NamedTuple):
    """Where the keys of a prefill go.

    Attributes:
        source: int64 [M], places in the packed row.
        row, slot: int64 [M], where they are kept.
    """

    source: Tensor
    row: Tensor
    slot: Tensor


class Visible(NamedTuple):
    """What one new token of each of R rows sees.

    Attributes:
        row: int64 [R], 0 to R - 1.
        slot: int64 [R], where its own key goes.
        longest: slots that some row uses, the new ones among them.
        mask: bool [R, 1, 1, longest], those that the row uses; None: all rows use all.
    """

    row: Tensor
    slot: Tensor
    longest: int
    mask: Tensor | None


class LayerCache:
    """Keys and values of one layer.

    Attributes:
        window: most keys that are kept; None: all.
        kept: keys and values [2, rows, K, slots, D], in the dtype of the layer; None before the
            first prefill.
        last: [rows, K, D], the last key of each row before rotation, where keys are shifted.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.kept: Tensor | None = None
        self.last: Tensor | None = None

    def reserve(self, like: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values with room for `rows` texts of `length` tokens.

        Args:
            like: [..., K, D], of the dtype and on the device of what is to be kept.
        """
        slots = length if self.window is None else min(length, self.window)
        if self.kept is None:
            self.kept = like.new_zeros(2, rows, like.shape[-2], slots, like.shape[-1])
        else:
            _, had_rows, _, had_slots, _ = self.kept.shape
            if slots > had_slots:  # twice as many, so that few tokens cause a copy
                slots = max(slots, 2 * had_slots)
                slots = slots if self.window is None else min(slots, self.window)
            more = (0, 0, 0, max(0, slots - had_slots), 0, 0, 0, max(0, rows - had_rows))
            if any(more):
                self.kept = F.pad(self.kept, more)
        return self.kept[0], self.kept[1]

    def move(self, source: int, target: int) -> None:
        """Let a row be what another one is."""
        if self.kept is not None:
            self.kept[:, target] = self.kept[:, source]
        if self.last is not None:
            self.last[target] = self.last[source]

    def keep_last(self, k: Tensor, row: int = 0) -> None:
        """Keep the last keys [n, K, D] of the rows from `row` on."""
        had = k[:0] if self.last is None else self.last[:row]
        self.last = torch.cat((had, k))


class KVCache:
    """Keys and values of all layers.

    Args:
        windows: of each layer, None where there is no limit.
        device: where the model is.

    Attributes:
        lengths: tokens of each row that are kept, or were.
    """

    def __init__(self, windows: Sequence[int | None], device: torch.device) -> None:
        self.lengths: list[int] = []
        self._device = device
        self._layers = [LayerCache(window) for window in windows]

    def prefill(self, lengths: Sequence[int], contexts: Sequence[Any]) -> list[KeySource]:
        """Return the contexts with which a packed row of prompts is kept, as rows at the end.

        Args:
            lengths: of the prompts, one after another in a single row.
            contexts: of the model for that row, a layer each.
        """
        first = len(self.lengths)
        self.lengths += lengths
        longest = max(self.lengths)
        ends = torch.tensor(lengths, device=self._device).cumsum(0) - 1
        places = self._by_window(lambda window: self._places(first, lengths, window))
        return [
            _Prefill(layer, context, places[layer.window], first, ends, longest)
            for layer, context in zip(self._layers, contexts, strict=True)
        ]

    def extend(self, count: int) -> list[KeySource]:
        """Return the contexts with which the next `count` tokens of the last row are computed, and
        kept: its own and the earlier ones are seen."""
        row, length = len(self.lengths) - 1, self.lengths[-1]
        self.lengths[-1] = length + count
        masks = self._by_window(lambda window: self._mask(length, count, window))
        longest = max(self.lengths)
        return [_Extend(layer, row, length, masks[layer.window], longest) for layer in self._layers]

    def _mask(self, length: int, count: int, window: int | None) -> Tensor:
        """Return which keys tokens after `length` others see, bool [count, kept + count]."""
        first = 0 if window is None else max(0, length - window + 1)
        keys = torch.arange(first, length + count, device=self._device)
        queries = torch.arange(length, length + count, device=self._device)[:, None]
        seen = keys <= queries
        return seen if window is None else seen & (keys > queries - window)

    def decode(self) -> list[KeySource]:
        """Return the contexts with which the next token of each row is computed, and kept."""
        visible = self._by_window(self._visible)
        self.lengths = [length + 1 for length in self.lengths]
        longest = max(self.lengths)
        return [_Decode(layer, visible[layer.window], longest) for layer in self._layers]

    def remove(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            for layer in self._layers:
                layer.move(last, row)
        self.lengths[row] = self.lengths[last]
        del self.lengths[last]

    def _by_window(self, of: Callable[[int | None], T]) -> dict[int | None, T]:
        """Return what follows from a window alone, once for all layers that have it."""
        return {window: of(window) for window in {layer.window for layer in self._layers}}

    def _places(self, first: int, lengths: Sequence[int], window: int | None) -> Places:
        source, rows, slots = [], [], []
        begin = 0
        for row, length in enumerate(lengths, first):
            kept = range(0 if window is None else max(0, length - window), length)
            source += [begin + position for position in kept]
            rows += [row] * len(kept)
            slots += [position if window is None else position % window for position in kept]
            begin += length
        return Places(*(torch.tensor(each, device=self._device) for each in (source, rows, slots)))

    def _visible(self, window: int | None) -> Visible:
        slots = [length if window is None else length % window for length in self.lengths]
        used = [
            length + 1 if window is None else min(length + 1, window) for length in self.lengths
        ]
        longest = max(used)
        slot = torch.tensor(slots, device=self._device)
        row = torch.arange(len(slots), device=self._device)
        if min(used) == longest:
            return Visible(row, slot, longest, None)
        places = torch.arange(longest, device=self._device)
        mask = places < torch.tensor(used, device=self._device)[:, None]  # [R, longest]
        return Visible(row, slot, longest, mask[:, None, None])


class _Prefill(KeySource):
    """Attends as the model does, and keeps the keys."""

    def __init__(
        self,
        layer: LayerCache,
        context: Any,
        places: Places,
        first: int,
        ends: Tensor,
        longest: int,
    ) -> None:
        self._layer, self._context, self._places = layer, context, places
        self._first, self._ends, self._longest = first, ends, longest

    def before(self, k: Tensor) -> Tensor:
        self._layer.keep_last(k[0, self._ends], self._first)
        return keys_before(k, k[:, :1])

    def attend(self, own: Attend, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        rows = self._first + len(self._ends)
        keys, values = self._layer.reserve(k, rows, self._longest)
        source, row, slot = self._places
        keys[row, :, slot] = k[0, source]  # [M, K, D]
        values[row, :, slot] = v[0, source]
        return own(q, k, v, self._context, scores)


class _Extend(KeySource):
    """Attends to what a row has and to more of its tokens, and keeps their keys."""

    def __init__(
        self, layer: LayerCache, row: int, length: int, mask: Tensor, longest: int
    ) -> None:
        self._layer, self._row, self._length = layer, row, length
        self._mask, self._longest = mask, longest

    def before(self, k: Tensor) -> Tensor:
        last = self._layer.last
        assert last is not None
        self._layer.keep_last(k[0, -1:], self._row)
        return keys_before(k, last[None, None, self._row])

    def attend(self, own: Attend, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        layer, row, begin, count = self._layer, self._row, self._length, q.shape[1]
        window, size = layer.window, q.shape[-1]
        keys, values = layer.reserve(k, row + 1, self._longest)
        kept = torch.arange(begin + count - self._mask.shape[1], begin, device=k.device)
        old = kept if window is None else kept % window
        # Read before the ring is written: [K, kept + count, D]
        all_keys = torch.cat([keys[row, :, old], k[0].transpose(0, 1)], dim=1)
        all_values = torch.cat([values[row, :, old], v[0].transpose(0, 1)], dim=1)
        first = 0 if window is None else max(0, count - window)
        new = torch.arange(begin + first, begin + count, device=k.device)
        new = new if window is None else new % window
        keys[row, :, new] = k[0, first:].transpose(0, 1)
        values[row, :, new] = v[0, first:].transpose(0, 1)
        groups = q[0].view(count, k.shape[2], -1, size).permute(1, 2, 0, 3)  # [K, H / K, n, D]
        if scores.softcap is None:
            wide_keys = all_keys[:, None].expand(-1, groups.shape[1], -1, -1)
            wide_values = all_values[:, None].expand(-1, groups.shape[1], -1, -1)
            out = F.scaled_dot_product_attention(
                groups, wide_keys, wide_values, attn_mask=self._mask, scale=scores.scale
            )
        else:
            out = attention_by_products(groups, all_keys, all_values, self._mask, scores)
        return out.permute(2, 0, 1, 3).reshape(1, count, -1, size)


class _Decode(KeySource):
    """Keeps the key of one token of each row, and attends to all of the row."""

    def __init__(self, layer: LayerCache, visible: Visible, longest: int) -> None:
        self._layer, self._visible, self._longest = layer, visible, longest

    def before(self, k: Tensor) -> Tensor:
        last = self._layer.last
        assert last is not None
        self._layer.keep_last(k[:, 0])
        return last[: len(k), None]

    def attend(self, own: Attend, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        rows, _, heads, size = q.shape
        keys, values = self._layer.reserve(k, rows, self._longest)
        row, slot, used, mask = self._visible
        keys[row, :, slot] = k[:, 0]  # [R, K, D]
        values[row, :, slot] = v[:, 0]
        queries = q.view(rows, k.shape[2], heads // k.shape[2], size)  # [R, K, H / K, D]
        keys, values = keys[:rows, :, :used], values[:rows, :, :used]  # [R, K, used, D]
        if scores.softcap is None:
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=scores.scale
            )
        else:
            seen = None if mask is None else mask[:, :, None]
            out = attention_by_products(queries[:, :, :, None], keys, values, seen, scores)
        return out.reshape(rows, 1, heads, size)
