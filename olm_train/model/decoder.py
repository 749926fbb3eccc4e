"""A pre-norm decoder-only transformer: token ids and document layout in, logits out.

    ids -> embeddings -> [x += attention(norm(x)); x += feed_forward(norm(x))] * n -> norm -> head

A row holds pieces of several documents. Rotary positions restart and attention is cut at each
document's start, so the logits of one document are a function of that document alone.

The decoder neither initialises its weights (`init.py`) nor knows how it is spread over processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olm_data.errors import UsageError
from olm_train.model.attention import Attention, DocumentLayout, attention_backend
from olm_train.model.layers import Linear, RMSNorm, SwiGLU, rope_table


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder.

    Attributes:
        vocab_size: entries of the embedding table and of the head.
        d_model: width of the residual stream.
        n_layers: number of blocks.
        n_heads: query heads of a block.
        n_kv_heads: key and value heads; divides n_heads. Default: n_heads.
        head_dim: size of a head, even. Default: d_model / n_heads.
        hidden_size: width of the feed-forward layer. Default: 8/3 d_model, rounded up to a
            multiple of 64.
        rope_theta: base of the rotary wave lengths.
        norm_eps: added to the mean square in each RMSNorm.
        qk_norm: normalise each query and key head.
        tie_embeddings: use the embedding table as the head.
        attention: name of the attention back-end.
        init_std: standard deviation of the initial weights.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int | None = None
    head_dim: int | None = None
    hidden_size: int | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    qk_norm: bool = False
    tie_embeddings: bool = False
    attention: str = "sdpa"
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads"):
            _require(getattr(self, name) >= 1, f"model.{name}", "must be at least 1")
        _require(
            self.head_dim is not None or self.d_model % self.n_heads == 0,
            "model.n_heads",
            f"{self.n_heads} heads do not divide d_model {self.d_model} and head_dim is not set",
        )
        _require(self.head_size % 2 == 0, "model.head_dim", f"{self.head_size} is odd; RoPE pairs")
        _require(
            self.kv_heads >= 1 and self.n_heads % self.kv_heads == 0,
            "model.n_kv_heads",
            f"{self.kv_heads} does not divide the {self.n_heads} query heads",
        )
        attention_backend(self.attention)

    @property
    def kv_heads(self) -> int:
        """Key and value heads, default filled in."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_size(self) -> int:
        """Size of a head, default filled in."""
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer, default filled in."""
        if self.hidden_size is not None:
            return self.hidden_size
        return -(-8 * self.d_model // (3 * 64)) * 64

    @property
    def num_non_embedding_params(self) -> int:
        """Parameters outside the embedding table and the head."""
        heads = self.n_heads + self.kv_heads  # w_qkv and w_out together: 2 H + 2 K
        attention = 2 * self.d_model * heads * self.head_size
        norms = 2 * self.d_model + (2 * self.head_size if self.qk_norm else 0)
        feed_forward = 3 * self.d_model * self.ffn_size
        return self.n_layers * (attention + feed_forward + norms) + self.d_model

    @property
    def num_params(self) -> int:
        """All parameters; a tied head is counted once."""
        tables = 1 if self.tie_embeddings else 2
        return self.num_non_embedding_params + tables * self.vocab_size * self.d_model

    def build(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Decoder:
        """Build the decoder with uninitialised weights; device "meta" allocates nothing."""
        return Decoder(self, device=device, dtype=dtype)


def _require(condition: bool, where: str, what: str) -> None:
    if not condition:
        raise UsageError(f"{where}: {what}", where=where)


class Embedding(nn.Module):
    """The table of token vectors, weight [vocab_size, d_model]."""

    def __init__(self, vocab_size: int, d_model: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model, **factory))

    def forward(self, ids: Tensor) -> Tensor:
        """Look up [b, S] ids: [b, S, d_model]."""
        return F.embedding(ids, self.weight)


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, config: DecoderConfig, **factory: Any) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps, **factory)
        self.attention = Attention(
            config.d_model,
            config.n_heads,
            config.kv_heads,
            config.head_size,
            backend=attention_backend(config.attention),
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            **factory,
        )
        self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps, **factory)
        self.feed_forward = SwiGLU(config.d_model, config.ffn_size, **factory)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: Any) -> Tensor:
        """[b, S, d_model] -> [b, S, d_model]."""
        x = x + self.attention(self.attention_norm(x), cos, sin, context)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """The model. Build it with `DecoderConfig.build`.

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
        self.embeddings = Embedding(config.vocab_size, config.d_model, **factory)
        self.blocks = nn.ModuleList(Block(config, **factory) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps, **factory)
        self.lm_head = (
            None if config.tie_embeddings else Linear(config.d_model, config.vocab_size, **factory)
        )

    def forward(
        self,
        input_ids: Tensor,
        *,
        doc_start: Tensor | None = None,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Predict the token after each token.

        Args:
            input_ids: int64 [b, S].
            doc_start: int [b, S], index within the row of the first token of each token's
                document. None: each row is one document.
            positions: int [b, S], distance from the document's first token. None: 0..S-1.
            cu_seqlens: int32 [n], document offsets over the flattened micro-batch; only back-ends
                without a mask read them.
            max_seqlen: upper bound of a document's length, likewise.

        Returns:
            Logits [b, S, vocab_size] in the compute dtype.
        """
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        cos, sin = rope_table(positions, self.config.head_size, self.config.rope_theta)
        context = self.backend.prepare(DocumentLayout(doc_start, cu_seqlens, max_seqlen))
        x = self.embeddings(input_ids)  # [b, S, d_model]
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        for block in self.blocks:
            x = block(x, cos, sin, context)
        x = self.norm(x)
        if self.lm_head is None:
            return F.linear(x, self.embeddings.weight.to(x.dtype))  # [b, S, vocab_size]
        return self.lm_head(x)
