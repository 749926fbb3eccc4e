"""A decoder-only transformer: token ids and document layout in, logits out.

    ids -> embeddings -> block * n -> norm -> head -> logits

    pre_norm        x += attention(norm(x));        x += feed_forward(norm(x))
    reordered_norm  x += norm(attention(x));        x += norm(feed_forward(x))          (OLMo 2)
    peri_norm       x += norm(attention(norm(x)));  x += norm(feed_forward(norm(x)))    (Gemma 3)

A row holds pieces of several documents. Positions restart and attention is cut at each document's
start, so the logits of one document are a function of that document alone.

The decoder neither initialises its weights (`init.py`) nor knows how it is spread over processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olm_train.model.attention import attention_backend
from olm_train.model.attention_backend import DocumentLayout, Use
from olm_train.model.config import DecoderConfig
from olm_train.model.head import Head
from olm_train.model.layers import Attention, Linear, build_feed_forward, build_norm
from olm_train.model.rope import rope_table


class Embedding(nn.Module):
    """A table of vectors, weight [entries, d_model]."""

    def __init__(self, entries: int, d_model: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(entries, d_model, **factory))

    def forward(self, ids: Tensor) -> Tensor:
        """Look up [b, S] ids: [b, S, d_model]."""
        return F.embedding(ids, self.weight)


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream, with norms before or after."""

    def __init__(self, config: DecoderConfig, **factory: Any) -> None:
        super().__init__()

        def norm(needed: bool) -> nn.Module:
            return build_norm(config, config.d_model, **factory) if needed else nn.Identity()

        before, after = config.block != "reordered_norm", config.block != "pre_norm"
        self.attention_norm = norm(before)
        self.attention = Attention(config, **factory)
        self.post_attention_norm = norm(after)
        self.feed_forward_norm = norm(before)
        self.feed_forward = build_feed_forward(config, **factory)
        self.post_feed_forward_norm = norm(after)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, context: Any) -> Tensor:
        """[b, S, d_model] -> [b, S, d_model]; rope and context as in `Attention.forward`."""
        x = x + self.post_attention_norm(self.attention(self.attention_norm(x), rope, context))
        return x + self.post_feed_forward_norm(self.feed_forward(self.feed_forward_norm(x)))


class Decoder(nn.Module):
    """The model, its weights uninitialised; on the device "meta" it allocates nothing.

    Attributes:
        config: its shape.
        compute_dtype: dtype of the residual stream, so of all matrix products; None: that of the
            embedding table. Norm statistics, rotations and the loss are in fp32 in any case.
    """

    def __init__(self, config: DecoderConfig, **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.backend = attention_backend(config.attention)
        rows = config.padded_vocab_size
        self.embeddings = Embedding(rows, config.d_model, **factory)
        self.position_embeddings = (
            Embedding(config.max_positions, config.d_model, **factory)
            if config.max_positions is not None
            else None
        )
        self.blocks = nn.ModuleList(Block(config, **factory) for _ in range(config.n_layers))
        self.norm = build_norm(config, config.d_model, **factory)
        self.lm_head = None if config.tie_embeddings else Linear(config.d_model, rows, **factory)

    def require_attention(
        self, device: torch.device, dtype: torch.dtype, *, training: bool
    ) -> None:
        """Check that the attention back-end can compute in `dtype` on `device`.

        Raises:
            UsageError: it cannot; nothing is computed by another one instead.
        """
        use = Use(device, dtype, self.config.head_size, training)
        self.backend.require(self.config.attention, use)

    def forward(
        self,
        input_ids: Tensor,
        *,
        doc_start: Tensor | None = None,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        reduce: Callable[[Head, Tensor], Any] = Head.logits,
    ) -> Any:
        """Predict the token after each token.

        Args:
            input_ids: int64 [b, S].
            doc_start: int [b, S], index within the row of the first token of each token's
                document. None: each row is one document.
            positions: int [b, S], distance from the document's first token. None: 0..S-1.
            cu_seqlens: int32 [n], document offsets over the flattened micro-batch; only back-ends
                without a mask read them.
            max_seqlen: upper bound of a document's length, likewise.
            reduce: makes of the head and the normalised states [b, S, d_model] what is returned: a
                loss that never holds all logits. Called inside the forward pass, where FSDP2 has
                the head's weight gathered.

        Returns:
            What `reduce` gives; by default logits [b, S, vocab_size] in the compute dtype.

        Raises:
            UsageError: the attention back-end cannot run here.
        """
        config = self.config
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self._embed(input_ids, positions)  # [b, S, d_model]
        scalings = {"scaled": config.rope_scaling, "plain": None}
        ropes = {
            kind: kind
            and rope_table(positions, config.head_size, config.rope_theta, scalings[kind], x.dtype)
            for kind in dict.fromkeys(config.ropes)
        }
        self.require_attention(x.device, x.dtype, training=torch.is_grad_enabled())
        if doc_start is None:
            layout = DocumentLayout.whole_rows(x.shape[0], x.shape[1], x.device)
            if config.sliding_window is not None:
                layout = layout._replace(doc_start=torch.zeros_like(input_ids))
        else:
            layout = DocumentLayout(doc_start, cu_seqlens, max_seqlen or input_ids.shape[1])
        contexts = {
            window: self.backend.prepare(layout._replace(window=window))
            for window in dict.fromkeys(config.windows)
        }
        for block, rope, window in zip(self.blocks, config.ropes, config.windows, strict=True):
            x = block(x, ropes[rope], contexts[window])
        x = self.norm(x)
        return reduce(self.head(x.dtype), x)

    def head(self, dtype: torch.dtype) -> Head:
        """The map from normalised states of `dtype` to logits."""
        table = self.embeddings if self.lm_head is None else self.lm_head
        config = self.config
        return Head(table.weight.to(dtype), config.vocab_size, config.logit_softcap)

    def _embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embeddings(input_ids)  # [b, S, d_model]
        if self.config.embed_scale != 1.0:
            x = x * self.config.embed_scale
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions)
        return x if self.compute_dtype is None else x.to(self.compute_dtype)
