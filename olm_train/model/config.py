"""The shape of a decoder: its sizes, its parts, and what follows from both.

    Sizes (flat) + attention, feed_forward, norm, positions, block, head -> DecoderConfig

A part is a mapping with the `name` of its kind, in a file of its own; here they only meet.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Self

from olm_data.config.convert import parse
from olm_data.config.hints import Parts
from olm_data.config.values import Values
from olm_train.model.attention import AttentionConfig
from olm_train.model.block import Block, BlockConfig
from olm_train.model.feed_forward import FeedForwardPart, GeGLUConfig, GELUConfig, SwiGLUConfig
from olm_train.model.head import HeadConfig
from olm_train.model.mixture import MixtureConfig
from olm_train.model.norm import AnyNorm, NormPart, RMSNormConfig
from olm_train.model.part import Params, Sizes, require
from olm_train.model.positions import AnyPositions, PositionsPart, RoPEConfig
from olm_train.model.rope import Rope

AnyFeedForward = SwiGLUConfig | GeGLUConfig | GELUConfig | MixtureConfig

VOCABULARY_TABLES = ("embeddings.weight", "lm_head.weight")
"""Parameters with a row for each id, and those that pad them."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Sizes):
    """Shape of a decoder.

    Attributes:
        attention: attention of a block.
        feed_forward: the feed-forward layer of a block: gated, or `gelu` without a gate, GELU being
            approximated by tanh; or `moe`, a mixture of experts.
        norm: the kind of all norms.
        positions: rotary, or a learned table that is added to the embeddings (GPT-2). Both restart
            at each document.
        block: where the norms of a block stand.
        head: the map to logits.
    """

    decoder_class: ClassVar[type | None] = None
    """Of a subclass: the subclass of `Decoder` whose shape it is."""

    attention: Annotated[AttentionConfig, Parts(AttentionConfig, "olm_train.attentions")] = field(
        default_factory=AttentionConfig
    )
    feed_forward: Annotated[AnyFeedForward, Parts(FeedForwardPart, "olm_train.feed_forwards")] = (
        field(default_factory=SwiGLUConfig)
    )
    norm: Annotated[AnyNorm, Parts(NormPart, "olm_train.norms")] = field(
        default_factory=RMSNormConfig
    )
    positions: Annotated[AnyPositions, Parts(PositionsPart, "olm_train.positions")] = field(
        default_factory=RoPEConfig
    )
    block: Annotated[BlockConfig, Parts(BlockConfig, "olm_train.blocks")] = field(
        default_factory=BlockConfig
    )
    head: HeadConfig = field(default_factory=HeadConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.attention.check(self)
        self.feed_forward.check(self)
        self.positions.check(self, windowed=self.attention.sliding_window is not None)
        for name, ours in (("attention", AttentionConfig), ("block", BlockConfig)):
            require(
                type(getattr(self, name)) is ours or self.parametrization == "sp",
                name,
                f"a part of your own does not know what {self.parametrization} multiplies",
            )

    def changed(self, **changes: Any) -> Self:
        """Return the shape with fields replaced; a mapping replaces fields of a part of its kind.

        `config.changed(attention={"backend": "sdpa"})` leaves all else of `attention` as it is.

        Raises:
            UsageError: it cannot be.
        """
        for name, given in changes.items():
            part = getattr(self, name)
            if isinstance(given, dict) and given.get("name", _kind(part)) == _kind(part):
                whole = {each.name: getattr(part, each.name) for each in fields(part)} | given
                changes[name] = parse(type(part), Values({name: whole}), (name,))
        return replace(self, **changes)

    def build_block(self, feed_forward: FeedForwardPart, **factory: Any) -> Block:
        """Return a block with one of `feed_forwards`."""
        parts = (self.norm, self.attention, feed_forward)
        return self.block.build(self, *parts, **factory)

    @property
    def max_positions(self) -> int | None:
        """Tokens of the longest document, None where positions set no limit."""
        return self.positions.entries

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window, None where there is no limit."""
        return self.attention.windows(self)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """Each layer's rotary positions, None where it has none."""
        return self.positions.ropes(self.windows)

    @property
    def feed_forwards(self) -> tuple[FeedForwardPart, ...]:
        """The feed-forward layer of each block."""
        return tuple(map(self.feed_forward.of_layer, range(self.n_layers)))

    @property
    def num_non_embedding_params(self) -> int:
        """Parameters outside the embedding tables and the head."""
        total = sum(Params.of(self.norm.build(self.d_model, device="meta")))
        for part, layers in Counter(self.feed_forwards).items():
            total += layers * sum(Params.of(self.build_block(part, device="meta")))
        return total

    @property
    def num_params(self) -> int:
        """All parameters; a tied head is counted once, rows that pad the vocabulary never."""
        tables = self.head.tables() * self.vocab_size + (self.max_positions or 0)
        return self.num_non_embedding_params + tables * self.d_model

    @property
    def num_active_params(self) -> int:
        """Those that a token passes: of a mixture of experts, `top_k` of them."""
        idle = 0
        for part, layers in Counter(self.feed_forwards).items():
            idle += layers * (
                sum(Params.of(part.build(self, device="meta"))) - sum(part.active(self))
            )
        return self.num_params - idle


def _kind(part: Any) -> str | None:
    return getattr(part, "name", None)
