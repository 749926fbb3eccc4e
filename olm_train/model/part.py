"""What the parts of a decoder share: the sizes they are built for, and what each says of itself.

    Sizes, a part of train.yaml --build--> module --> parameters, counted on the device "meta"
                                `-flops, kept, products--> numbers of one layer and token

A part is a configuration beside the module that it stands for, in one file. A part of one's own
derives from the base of its kind: `FeedForwardPart`, `NormPart`, `PositionsPart`,
`AttentionConfig`, `BlockConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from msgspec import Meta
from torch import nn

from olm_data.config.convert import Config
from olm_data.config.hints import PositiveFloat
from olm_data.errors import UsageError
from olm_train.model.parametrization import BaseConfig, Name, Scaling

Vocabulary = Annotated[int, Meta(ge=1, le=1 << 24)]
Width = Annotated[int, Meta(ge=1, le=1 << 18)]
Depth = Annotated[int, Meta(ge=1, le=1 << 13)]
"""Sizes beyond every model's: a configuration from elsewhere cannot ask for all memory."""

FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Sizes(Config):
    """Sizes of a decoder, which all of its parts are built for.

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
        embed_scale: what the token embeddings are multiplied by (Gemma: sqrt of `d_model`).
        init_std: standard deviation of the initial weights.
        parametrization: how initial weights, rates and products change with the model's size, so
            that what was tuned at the base's stays right: [mup, completep or
            muon_mup](../how-to/transfer-rates.md); sp: they do not.
        base: the size that rates and `init_std` were tuned at; with a `parametrization` but sp.
    """

    vocab_size: Vocabulary
    vocab_multiple: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    d_model: Width
    n_layers: Depth
    n_heads: Depth
    n_kv_heads: Depth | None = None
    head_dim: Depth | None = None
    embed_scale: PositiveFloat = 1.0
    init_std: PositiveFloat = 0.02
    parametrization: Name = "sp"
    base: BaseConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.head_dim is not None or self.d_model % self.n_heads == 0,
            "n_heads",
            f"{self.n_heads} heads do not divide d_model {self.d_model} and head_dim is not set",
        )
        require(
            self.n_heads % self.kv_heads == 0,
            "n_kv_heads",
            f"{self.kv_heads} does not divide the {self.n_heads} query heads",
        )
        require(
            (self.base is None) == (self.parametrization == "sp"),
            "base",
            f"the parametrization {self.parametrization} "
            + ("has no base size" if self.base else "needs the base size: d_model and n_layers"),
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
    def scaling(self) -> Scaling:
        """The parametrization at this size."""
        base = self.base or BaseConfig(d_model=self.d_model, n_layers=self.n_layers)
        width, depth = self.d_model / base.d_model, self.n_layers / base.n_layers
        return Scaling(self.parametrization, width, depth, base.head_dim or 1)


class Params(NamedTuple):
    """Entries of a module's parameters.

    Attributes:
        matrices: of those with more than one dimension.
        vectors: of all others.
    """

    matrices: int
    vectors: int

    @classmethod
    def of(cls, module: nn.Module) -> Params:
        """Count those of a module, which may be on the device "meta"."""
        sizes = [(p.numel(), p.ndim > 1) for p in module.parameters()]
        matrices = sum(size for size, matrix in sizes if matrix)
        return cls(matrices, sum(size for size, _ in sizes) - matrices)


class Saved(NamedTuple):
    """What the activations that are kept for the backward pass are counted for.

    Attributes:
        itemsize: bytes of an element in the compute dtype.
        length: tokens of a row.
    """

    itemsize: int
    length: int


def require(condition: bool, field: str, what: str) -> None:
    """Refuse a field of a shape.

    Raises:
        UsageError: the condition does not hold.
    """
    if not condition:
        raise UsageError(what, where=field)
