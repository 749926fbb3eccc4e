"""Feed-forward layers: configuration, module and cost of each kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from olm_data.config.convert import Config
from olm_train.model.layers import LinearLayer
from olm_train.model.part import Params, Saved, Sizes
from olm_train.model.tap import NO_TAP, Tap


class GatedFeedForward(nn.Module):
    """W_down (activation(W_gate x) * W_up x): SwiGLU or GeGLU (Shazeer, 2020).

    `w_gate_up` holds the rows of W_gate, then those of W_up: one matrix product instead of two.

    Args:
        d_model: size of the last dimension of input and output.
        hidden_size: size between.
        activation: "silu" or "gelu" (the approximation with tanh, as Gemma's).
        bias: of both linear maps.
    """

    def __init__(
        self, d_model: int, hidden_size: int, *, activation: str, bias: bool, **factory: Any
    ) -> None:
        super().__init__()
        self.gelu = activation == "gelu"
        parts = (hidden_size, hidden_size)
        self.w_gate_up = LinearLayer(d_model, sum(parts), parts=parts, bias=bias, **factory)
        self.w_down = LinearLayer(hidden_size, d_model, bias=bias, **factory)

    def forward(self, x: Tensor, tap: Tap = NO_TAP) -> Tensor:
        """Map [..., d_model] to [..., d_model]; `tap` looks at activations."""
        gate, up = tap("w_gate_up", self.w_gate_up(x)).chunk(2, dim=-1)  # each [..., hidden_size]
        active = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        return tap("w_down", self.w_down(active * up))


class FeedForward(nn.Module):
    """W_down gelu(W_up x), with GPT-2's approximation of gelu by tanh."""

    def __init__(self, d_model: int, hidden_size: int, *, bias: bool, **factory: Any) -> None:
        super().__init__()
        self.w_up = LinearLayer(d_model, hidden_size, bias=bias, **factory)
        self.w_down = LinearLayer(hidden_size, d_model, bias=bias, **factory)

    def forward(self, x: Tensor, tap: Tap = NO_TAP) -> Tensor:
        """Map [..., d_model] to [..., d_model]; `tap` looks at activations."""
        up = tap("w_up", self.w_up(x))  # [..., hidden_size]
        return tap("w_down", self.w_down(F.gelu(up, approximate="tanh")))


@dataclass(frozen=True, kw_only=True)
class FeedForwardPart(Config, ABC):
    """Base of every kind of feed-forward layer: a map of each token's state by itself."""

    routes: ClassVar[bool] = False
    """Whether the layers are mixtures of experts, which take a `Routing` too; see `mixture.py`."""

    def check(self, sizes: Sizes) -> None:
        """Refuse what these sizes do not allow.

        Raises:
            UsageError: names the field.
        """

    def of_layer(self, layer: int) -> FeedForwardPart:
        """Return the kind of a layer, from 0."""
        return self

    @abstractmethod
    def build(self, sizes: Sizes, **factory: Any) -> nn.Module:
        """Return the layer of a block: (x [..., d_model], tap) -> [..., d_model].

        The weight of a map back to the stream is called `w_down`: its initial values are smaller
        the more blocks there are.
        """

    @abstractmethod
    def kept(self, sizes: Sizes, saved: Saved) -> float:
        """Bytes of activations that a token keeps for the backward pass, without the input."""

    @abstractmethod
    def products(self, sizes: Sizes) -> int:
        """Elements that matrix products give a token; all that "selected_ops" keeps."""

    def active(self, sizes: Sizes) -> Params:
        """Parameters that a token passes; by default all."""
        return Params.of(self.build(sizes, device="meta"))

    def flops(self, sizes: Sizes) -> int:
        """FLOPs of forward and backward for a token: 6 an entry of each matrix that it passes."""
        return 6 * self.active(sizes).matrices


@dataclass(frozen=True, kw_only=True)
class DenseFeedForward(FeedForwardPart):
    """Linear maps with an activation between, the same ones for every token.

    Attributes:
        hidden_size: width of the layer. Default: 8/3 d_model, rounded up to a multiple of 64; with
            gelu 4 d_model.
        bias: of all its linear maps.
    """

    gate: ClassVar[str | None] = None
    """Activation of a map that another one is multiplied with; None: there is no such map."""

    hidden_size: Annotated[int, Meta(ge=1, le=1 << 21)] | None = None
    bias: bool = False

    def width(self, sizes: Sizes) -> int:
        """Width of the layer, default filled in."""
        usual = -(-8 * sizes.d_model // (3 * 64)) * 64 if self.gate else 4 * sizes.d_model
        return self.hidden_size or usual

    def build(self, sizes: Sizes, **factory: Any) -> nn.Module:
        widths = (sizes.d_model, self.width(sizes))
        if self.gate is None:
            return FeedForward(*widths, bias=self.bias, **factory)
        return GatedFeedForward(*widths, activation=self.gate, bias=self.bias, **factory)

    def kept(self, sizes: Sizes, saved: Saved) -> float:
        # up, act(up); or gate and up, act(gate), their product
        return saved.itemsize * (4 if self.gate else 2) * self.width(sizes)

    def products(self, sizes: Sizes) -> int:
        return (2 if self.gate else 1) * self.width(sizes) + sizes.d_model


@dataclass(frozen=True, kw_only=True)
class SwiGLUConfig(DenseFeedForward):
    """SiLU of a gate times a linear map.

    Attributes:
        name: swiglu.
    """

    name: Literal["swiglu"] = "swiglu"
    gate = "silu"


@dataclass(frozen=True, kw_only=True)
class GeGLUConfig(DenseFeedForward):
    """GELU of a gate, by tanh, times a linear map.

    Attributes:
        name: geglu.
    """

    name: Literal["geglu"] = "geglu"
    gate = "gelu"


@dataclass(frozen=True, kw_only=True)
class GELUConfig(DenseFeedForward):
    """GELU, by tanh, of a linear map, without a gate.

    Attributes:
        name: gelu.
    """

    name: Literal["gelu"] = "gelu"
