"""How a model knows places in a document: configuration and cost of each kind.

    rope      queries and keys of each layer are rotated, see `rope.py`
    learned   a table is added to the embeddings (GPT-2)

Both restart at each document.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from olm_data.config.convert import Config
from olm_train.model.layers import Embedding
from olm_train.model.part import FP32, Depth, Sizes, Vocabulary, require
from olm_train.model.rope import Rope, RopeScaling

Base = Annotated[float, Meta(gt=1)]
"""Of wave lengths: each is longer than the one before."""


@dataclass(frozen=True, kw_only=True)
class PositionsPart(Config, ABC):
    """Base of every kind of positions."""

    rotates: ClassVar[bool] = False
    """Whether queries and keys are changed by them."""

    @property
    def entries(self) -> int | None:
        """Rows of a table that is added to the embeddings, so tokens of the longest document."""
        return None

    def check(self, sizes: Sizes, *, windowed: bool) -> None:
        """Refuse what these sizes do not allow.

        Args:
            windowed: whether attention has windows.

        Raises:
            UsageError: names the field.
        """

    @abstractmethod
    def ropes(self, windows: Sequence[int | None]) -> tuple[Rope | None, ...]:
        """Rotary positions of the layers with these windows, None where a layer has none."""

    def build(self, sizes: Sizes, **factory: Any) -> Embedding | None:
        """Return the table that is added to the embeddings, None: there is none."""
        return None if self.entries is None else Embedding(self.entries, sizes.d_model, **factory)

    def kept(self, sizes: Sizes) -> float:
        """Bytes that a token keeps outside the blocks: cosines and sines."""
        return FP32 * sizes.head_size if self.rotates else 0


@dataclass(frozen=True, kw_only=True)
class RoPEConfig(PositionsPart):
    """Rotary positions.

    Attributes:
        name: rope.
        theta: base of the wave lengths; a larger one suits longer documents (ABF).
        theta_windowed: base in layers with a window; default: theta (Gemma 3: 10,000, and 1,000,000
            in the others).
        scaling: how the waves are stretched for longer documents; see below.
        scaling_windowed: false: layers with a window keep the waves as they were (OLMo 3).
        no_rope_layer_interval: n: every n-th layer has no positions at all; 4: the 4th, 8th, ...
    """

    name: Literal["rope"] = "rope"
    theta: Base = 10_000.0
    theta_windowed: Base | None = None
    scaling: RopeScaling | None = None
    scaling_windowed: bool = True
    no_rope_layer_interval: Depth | None = None

    rotates = True

    def check(self, sizes: Sizes, *, windowed: bool) -> None:
        require(sizes.head_size % 2 == 0, "head_dim", f"{sizes.head_size} is odd; RoPE pairs")
        require(
            self.theta_windowed is None or windowed,
            "positions.theta_windowed",
            "has no effect without attention.sliding_window",
        )
        require(
            self.scaling_windowed or (self.scaling is not None and windowed),
            "positions.scaling_windowed",
            "has no effect without scaling and attention.sliding_window",
        )

    def ropes(self, windows: Sequence[int | None]) -> tuple[Rope | None, ...]:
        whole = Rope(self.theta, self.scaling)
        windowed = Rope(
            self.theta_windowed or self.theta, self.scaling if self.scaling_windowed else None
        )
        every = self.no_rope_layer_interval
        return tuple(
            None
            if every is not None and (layer + 1) % every == 0
            else (whole if window is None else windowed)
            for layer, window in enumerate(windows)
        )


@dataclass(frozen=True, kw_only=True)
class LearnedPositionsConfig(PositionsPart):
    """A learned table of positions.

    Attributes:
        name: learned.
        max_positions: its entries: tokens of the longest document; not fewer than the mixture's
            sequence length.
    """

    name: Literal["learned"] = "learned"
    max_positions: Vocabulary

    @property
    def entries(self) -> int | None:
        return self.max_positions

    def ropes(self, windows: Sequence[int | None]) -> tuple[Rope | None, ...]:
        return (None,) * len(windows)


AnyPositions = RoPEConfig | LearnedPositionsConfig
