"""The shape of a decoder: sizes, kinds of layers, positions; and what follows from them.

Nothing here knows of tensors: what it costs to train a shape is found without building it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from olm_data.config.convert import Config
from olm_data.config.hints import PositiveFloat
from olm_data.errors import UsageError
from olm_train.model.attention import attention_backend
from olm_train.model.attention_backend import Scores
from olm_train.model.rope import Rope, RopeScaling

Vocabulary = Annotated[int, Meta(ge=1, le=1 << 24)]
Width = Annotated[int, Meta(ge=1, le=1 << 18)]
Depth = Annotated[int, Meta(ge=1, le=1 << 13)]
"""Sizes beyond every model's: a configuration from elsewhere cannot ask for all memory."""

VOCABULARY_TABLES = ("embeddings.weight", "lm_head.weight")
"""Parameters with a row for each id, and those that pad them."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Config):
    """Shape of a decoder.

    Attributes:
        vocab_size: ids the model knows and predicts; not fewer than the tokenizer's. In train.yaml
            the default is that of the lock.
        vocab_multiple: the embedding table and the head get rows of zeros up to a multiple of this
            (128: faster on GPUs). They are never looked up, predicted or trained, and no count has
            them.
        d_model: width of the residual stream.
        n_layers: number of blocks.
        n_heads: query heads of a block.
        n_kv_heads: key and value heads; divides n_heads. Fewer share them (grouped queries), 1
            shares it with all (multi-query). Default: n_heads.
        head_dim: size of a head, even where it is rotated. Default: d_model / n_heads.
        feed_forward: "swiglu", "geglu", or "gelu" without a gate. Both use the approximation of
            GELU by tanh.
        hidden_size: width of the feed-forward layer. Default: 8/3 d_model, rounded up to a
            multiple of 64; with "gelu" 4 d_model.
        bias: "qkv": of the query, key and value maps; "attention": of the output map too; "all":
            of every linear map in the blocks.
        block: norms before attention and feed-forward, "pre_norm"; after them, "reordered_norm"
            (OLMo 2); or both, "peri_norm" (Gemma 3).
        norm: kind of all norms: "rms_norm" or "layer_norm".
        norm_eps: added to the mean square, or variance, in each norm.
        norm_bias: the layer norms have a bias.
        norm_zero_centred: RMS norms multiply by 1 + weight, and weights start at 0 (Gemma).
        qk_norm: normalise queries and keys: "head": each head (Qwen 3), "full": all heads at once
            (OLMo 2).
        shift_keys: half of each key is that of the token before it in its document, so that one
            layer finds what followed a token like its own (induction). With RoPE it is the half
            that turns slowest. Costs nothing; no model of transformers has it.
        positions: "rope": rotary, or "learned": a table added to the embeddings (GPT-2). Both
            restart at each document.
        max_positions: entries of the learned table: tokens of the longest document; not fewer than
            the mixture's sequence length.
        rope_theta: base of the rotary wave lengths; a larger one suits longer documents (ABF).
        rope_theta_windowed: base in layers with a window; default: rope_theta (Gemma 3: 10,000, and
            1,000,000 in the others).
        rope_scaling: how rotary waves are stretched for longer documents; see below.
        rope_scaling_windowed: false: layers with a window keep the waves as they were (OLMo 3).
        no_rope_layer_interval: n: every n-th layer has no positions at all; 4: the 4th, 8th, ...
        sliding_window: keys a query sees, its own among them, by layer; the list is repeated over
            the layers, -1 is no limit: `[4096, 4096, 4096, -1]` (OLMo 3).
        query_pre_attn_scalar: products of queries and keys are divided by the square root of this
            (Gemma). Default: head_dim.
        attention_softcap: those products are bent into (-this, this) as logits are by
            logit_softcap (Gemma 2: 50). Back-ends math, sdpa, which then computes as math, flex and
            flash.
        attention: attention back-end: sdpa, math, varlen, flex or flash, [see
            below](#attention-back-ends); auto: [what fits the device](#what-auto-stands-for), and
            sdpa for a model that is built by itself.
        embed_scale: what the token embeddings are multiplied by (Gemma: sqrt of `d_model`).
        tie_embeddings: use the embedding table as the head.
        logit_softcap: logits are bent into (-this, this): this * tanh(logits / this) (Gemma 2: 30).
        init_std: standard deviation of the initial weights.
    """

    decoder_class: ClassVar[type | None] = None
    """Of a subclass: the subclass of `Decoder` whose shape it is."""

    vocab_size: Vocabulary
    vocab_multiple: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    d_model: Width
    n_layers: Depth
    n_heads: Depth
    n_kv_heads: Depth | None = None
    head_dim: Depth | None = None
    feed_forward: Literal["swiglu", "geglu", "gelu"] = "swiglu"
    hidden_size: Annotated[int, Meta(ge=1, le=1 << 21)] | None = None
    bias: Literal["qkv", "attention", "all"] | None = None
    block: Literal["pre_norm", "reordered_norm", "peri_norm"] = "pre_norm"
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norm_eps: PositiveFloat = 1e-6
    norm_bias: bool = False
    norm_zero_centred: bool = False
    qk_norm: Literal["head", "full"] | None = None
    shift_keys: bool = False
    positions: Literal["rope", "learned"] = "rope"
    max_positions: Vocabulary | None = None
    rope_theta: PositiveFloat = 10_000.0
    rope_theta_windowed: PositiveFloat | None = None
    rope_scaling: RopeScaling | None = None
    rope_scaling_windowed: bool = True
    no_rope_layer_interval: Depth | None = None
    sliding_window: tuple[int, ...] | None = None
    query_pre_attn_scalar: PositiveFloat | None = None
    attention_softcap: PositiveFloat | None = None
    attention: str = "auto"
    embed_scale: PositiveFloat = 1.0
    tie_embeddings: bool = False
    logit_softcap: PositiveFloat | None = None
    init_std: PositiveFloat = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.head_dim is not None or self.d_model % self.n_heads == 0,
            "n_heads",
            f"{self.n_heads} heads do not divide d_model {self.d_model} and head_dim is not set",
        )
        _require(
            self.n_heads % self.kv_heads == 0,
            "n_kv_heads",
            f"{self.kv_heads} does not divide the {self.n_heads} query heads",
        )
        _require(
            not self.norm_bias or self.norm == "layer_norm", "norm_bias", "an RMSNorm has no bias"
        )
        _require(
            not self.norm_zero_centred or self.norm == "rms_norm",
            "norm_zero_centred",
            "is of an RMSNorm",
        )
        _require(
            not self.shift_keys or self.head_size >= 4,
            "shift_keys",
            f"heads of {self.head_size} have no half to shift",
        )
        self._check_positions()
        attention_backend(self.attention)

    def _check_positions(self) -> None:
        windows = self.sliding_window
        _require(
            windows is None or (bool(windows) and all(w == -1 or w >= 1 for w in windows)),
            "sliding_window",
            "a window is at least 1 token, or -1 for all",
        )
        if self.positions == "learned":
            _require(self.max_positions is not None, "max_positions", "learned positions need it")
            for name in ("rope_scaling", "rope_theta_windowed", "no_rope_layer_interval"):
                _require(getattr(self, name) is None, name, "there is no RoPE: positions: learned")
        else:
            _require(self.max_positions is None, "max_positions", "is of positions: learned")
            _require(self.head_size % 2 == 0, "head_dim", f"{self.head_size} is odd; RoPE pairs")
            for name in ("rope_theta", "rope_theta_windowed"):
                theta = getattr(self, name)
                _require(theta is None or theta > 1, name, "must be more than 1")
            _require(
                self.rope_theta_windowed is None or windows is not None,
                "rope_theta_windowed",
                "has no effect without sliding_window",
            )
        _require(
            self.rope_scaling_windowed or bool(self.rope_scaling and windows),
            "rope_scaling_windowed",
            "has no effect without rope_scaling and sliding_window",
        )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table and of the head: vocab_size and the rows that pad it."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

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
        if self.feed_forward == "gelu":
            return 4 * self.d_model
        return -(-8 * self.d_model // (3 * 64)) * 64

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window, None where there is no limit."""
        pattern = self.sliding_window or (-1,)
        repeated = (pattern[layer % len(pattern)] for layer in range(self.n_layers))
        return tuple(None if window == -1 else window for window in repeated)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """Each layer's rotary positions, None where it has none."""
        if self.positions != "rope":
            return (None,) * self.n_layers
        whole = Rope(self.rope_theta, self.rope_scaling)
        windowed = Rope(
            self.rope_theta_windowed or self.rope_theta,
            self.rope_scaling if self.rope_scaling_windowed else None,
        )
        every = self.no_rope_layer_interval
        return tuple(
            None
            if every is not None and (layer + 1) % every == 0
            else (whole if window is None else windowed)
            for layer, window in enumerate(self.windows)
        )

    @property
    def scores(self) -> Scores:
        """What attention does to the products of queries and keys."""
        scalar = self.query_pre_attn_scalar
        return Scores(None if scalar is None else scalar**-0.5, self.attention_softcap)

    @property
    def num_matrix_params(self) -> int:
        """Entries of the blocks' matrices: what a token is multiplied with, but for the head."""
        heads = self.n_heads + self.kv_heads  # w_qkv and w_out together: 2 H + 2 K
        attention = 2 * self.d_model * heads * self.head_size
        matrices = 2 if self.feed_forward == "gelu" else 3
        return self.n_layers * (attention + matrices * self.d_model * self.ffn_size)

    @property
    def num_non_embedding_params(self) -> int:
        """Parameters outside the embedding tables and the head."""
        heads = self.n_heads + 2 * self.kv_heads
        norms = (4 if self.block == "peri_norm" else 2) * self.d_model
        if self.qk_norm == "head":
            norms += 2 * self.head_size
        elif self.qk_norm == "full":
            norms += (self.n_heads + self.kv_heads) * self.head_size
        biases = heads * self.head_size if self.bias else 0
        if self.bias in ("attention", "all"):
            biases += self.d_model
        if self.bias == "all":
            biases += self.d_model + (1 if self.feed_forward == "gelu" else 2) * self.ffn_size
        of_a_norm = 2 if self.norm_bias else 1
        vectors = of_a_norm * (self.n_layers * norms + self.d_model) + self.n_layers * biases
        return self.num_matrix_params + vectors

    @property
    def num_params(self) -> int:
        """All parameters; a tied head is counted once, rows that pad the vocabulary never."""
        tables = (1 if self.tie_embeddings else 2) * self.vocab_size
        return self.num_non_embedding_params + (tables + (self.max_positions or 0)) * self.d_model


def _require(condition: bool, field: str, what: str) -> None:
    if not condition:
        raise UsageError(what, where=field)
