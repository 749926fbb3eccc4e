"""The block: attention and feed-forward, each added to the residual stream, and where norms stand.

pre_norm        x += attention(norm(x));        x += feed_forward(norm(x))
reordered_norm  x += norm(attention(x));        x += norm(feed_forward(x))          (OLMo 2)
peri_norm       x += norm(attention(norm(x)));  x += norm(feed_forward(norm(x)))    (Gemma 3)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from olm_data.config.convert import Config
from olm_train.model.attention import AttentionConfig
from olm_train.model.feed_forward import FeedForwardPart
from olm_train.model.norm import NormPart
from olm_train.model.part import FP32, Saved, Sizes
from olm_train.model.tap import NO_TAP, Tap, Watcher, names_within


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream, with norms before or after."""

    def __init__(
        self,
        config: BlockConfig,
        sizes: Sizes,
        norm: NormPart,
        attention: AttentionConfig,
        feed_forward: FeedForwardPart,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.residual = sizes.scaling.residual

        def own(needed: bool) -> nn.Module:
            return norm.build(sizes.d_model, **factory) if needed else nn.Identity()

        self.attention_norm = own(config.before)
        self.attention = attention.build(sizes, norm, **factory)
        self.post_attention_norm = own(config.after)
        self.feed_forward_norm = own(config.before)
        self.feed_forward = feed_forward.build(sizes, **factory)
        self.post_feed_forward_norm = own(config.after)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        context: Any,
        tap: Tap = NO_TAP,
        routing: Any = None,
    ) -> Any:
        """[b, S, d_model] -> [b, S, d_model]; other arguments as in `Attention.forward`.

        With `routing` return a pair, as the feed-forward layer does (`mixture.py`).
        """
        h = tap("attention_norm", self.attention_norm(x))
        h = self.attention(h, rope, context, tap.within("attention"))
        x = self._added(x, tap("post_attention_norm", self.post_attention_norm(h)))
        h = tap("feed_forward_norm", self.feed_forward_norm(x))
        told = () if routing is None else (routing,)
        h = self.feed_forward(h, tap.within("feed_forward"), *told)
        h, *routed = h if told else (h,)
        h = tap("post_feed_forward_norm", self.post_feed_forward_norm(h))
        x = tap("", self._added(x, h))
        return (x, *routed) if told else x

    def _added(self, x: Tensor, h: Tensor) -> Tensor:
        return x + (h if self.residual == 1.0 else h * self.residual)

    def watched(
        self,
        slots: Tensor,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        context: Any,
        **options: Any,
    ) -> tuple[Any, Tensor]:
        """Return what `forward` does, and the rows of a `Watcher` [submodules and this, ROW]."""
        watcher = Watcher(names_within(self), slots)
        found = type(self).forward(self, x, rope, context, watcher, **options)
        return found, torch.stack(watcher.rows)


@dataclass(frozen=True, kw_only=True)
class BlockConfig(Config):
    """Where the norms of a block stand.

    Attributes:
        name: norms before attention and feed-forward, "pre_norm"; after them, "reordered_norm"
            (OLMo 2); or both, "peri_norm" (Gemma 3).
    """

    name: Literal["pre_norm", "reordered_norm", "peri_norm"] = "pre_norm"

    @property
    def before(self) -> bool:
        """Whether norms stand before attention and feed-forward."""
        return self.name != "reordered_norm"

    @property
    def after(self) -> bool:
        """Whether norms stand after them."""
        return self.name != "pre_norm"

    def build(
        self,
        sizes: Sizes,
        norm: NormPart,
        attention: AttentionConfig,
        feed_forward: FeedForwardPart,
        **factory: Any,
    ) -> Block:
        """Return a block of these parts."""
        return Block(self, sizes, norm, attention, feed_forward, **factory)

    def kept(self, sizes: Sizes, saved: Saved) -> float:
        """Bytes of activations that a token keeps for the backward pass, beside those of attention
        and feed-forward: what goes into and comes out of each, and statistics of norms."""
        norms = self.before + self.after  # of attention, and of the feed-forward
        return saved.itemsize * 2 * (norms + 1) * sizes.d_model + FP32 * 2 * norms
