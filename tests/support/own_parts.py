"""Parts of one's own, as a user has them: imported by the path `support.own_parts:...`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from olm_data.bounded_json import JsonObject
from olm_data.config.hints import PositiveFloat, PositiveInt
from olm_train.callbacks.base import Callback
from olm_train.model.attention import Attention, AttentionConfig
from olm_train.model.block import Block, BlockConfig
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.feed_forward import FeedForwardPart
from olm_train.model.head import Head
from olm_train.model.layers import LinearLayer
from olm_train.model.loss import LossSums, loss_sums
from olm_train.model.loss_config import OwnLoss
from olm_train.model.norm import NormPart
from olm_train.model.part import Saved, Sizes
from olm_train.model.positions import PositionsPart
from olm_train.model.rope import Rope
from olm_train.model.tap import NO_TAP, Tap
from olm_train.optim.base import OptimConfig
from olm_train.optim.groups import ParamGroup
from olm_train.optim.schedule_base import LRSchedule


@dataclass(frozen=True, kw_only=True)
class ScaledConfig(DecoderConfig):
    """A decoder whose logits are scaled.

    Attributes:
        scale: what they are multiplied by.
    """

    scale: float = 1.0


class ScaledDecoder(Decoder):
    """With a parameter, a persistent buffer and a field of its own."""

    def __init__(self, config: ScaledConfig, **factory: Any) -> None:
        super().__init__(config, **factory)
        self.scale = config.scale
        self.gain = nn.Parameter(torch.ones(1, **factory))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def head(self, dtype: torch.dtype) -> Head:
        """The map to logits, scaled."""
        head = super().head(dtype)
        return head._replace(weight=head.weight * (self.gain * self.scale).to(dtype))


ScaledConfig.decoder_class = ScaledDecoder


class Squared(nn.Module):
    """W_down relu(W_up x)^2."""

    def __init__(self, d_model: int, hidden_size: int, **factory: Any) -> None:
        super().__init__()
        self.w_up = LinearLayer(d_model, hidden_size, **factory)
        self.w_down = LinearLayer(hidden_size, d_model, **factory)

    def forward(self, x: Tensor, tap: Tap = NO_TAP) -> Tensor:
        return tap("w_down", self.w_down(tap("w_up", self.w_up(x)).relu().square()))


@dataclass(frozen=True, kw_only=True)
class SquaredReLU(FeedForwardPart):
    """A fourth feed-forward layer, in one file.

    Attributes:
        hidden_size: its width.
    """

    hidden_size: PositiveInt

    def build(self, sizes: Sizes, **factory: Any) -> Squared:
        return Squared(sizes.d_model, self.hidden_size, **factory)

    def kept(self, sizes: Sizes, saved: Saved) -> float:
        return saved.itemsize * 3 * self.hidden_size  # up, relu(up), its square

    def products(self, sizes: Sizes) -> int:
        return self.hidden_size + sizes.d_model


@dataclass(frozen=True, kw_only=True)
class HalfNorm(NormPart):
    """A norm without weights, divided by two."""

    def build(self, size: int, **factory: Any) -> nn.Module:
        return nn.Sequential(nn.RMSNorm(size, elementwise_affine=False), Halved())


class Halved(nn.Module):
    """Half of what comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


@dataclass(frozen=True, kw_only=True)
class NoPositions(PositionsPart):
    """No positions at all."""

    def ropes(self, windows: Sequence[int | None]) -> tuple[Rope | None, ...]:
        return (None,) * len(windows)


class GatedAttention(Attention):
    """Attention whose output is halved."""

    def forward(self, *arguments: Any) -> Tensor:
        return super().forward(*arguments) / 2


@dataclass(frozen=True, kw_only=True)
class HalvedAttention(AttentionConfig):
    """Attention whose output is halved."""

    def build(self, sizes: Sizes, norm: NormPart, **factory: Any) -> nn.Module:
        return GatedAttention(self, sizes, norm, **factory)


class DoubledBlock(Block):
    """A block whose output is doubled."""

    def forward(self, *arguments: Any) -> Tensor:
        return super().forward(*arguments) * 2


@dataclass(frozen=True, kw_only=True)
class DoubledBlocks(BlockConfig):
    """Blocks whose output is doubled."""

    def build(self, *parts: Any, **factory: Any) -> Block:
        return DoubledBlock(self, *parts, **factory)


@dataclass(frozen=True, kw_only=True)
class SpikyLoss(OwnLoss):
    """Cross entropy times a factor.

    Attributes:
        factor: of the gradient.
    """

    factor: PositiveFloat = 1.0

    def sums(self, head: Head, x: Tensor, labels: Tensor) -> LossSums:
        """As the plain loss has them, the first one multiplied."""
        plain = loss_sums(head.logits(x), labels, None)
        return plain._replace(total=plain.total * self.factor)


@dataclass(frozen=True, kw_only=True)
class PlainSGDConfig(OptimConfig):
    """Gradient descent without a state."""

    def _build(self, model: nn.Module, groups: list[ParamGroup]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.lr)


@dataclass(frozen=True, kw_only=True)
class StairsConfig(LRSchedule):
    """Half the rate after every so many steps.

    Attributes:
        every: length of a stair.
    """

    every: PositiveInt

    def _factor(self, at: int, end: int) -> float:
        return float(0.5 ** (at // self.every))


@dataclass(kw_only=True)
class CountingCallback(Callback):
    """Counts steps, over restarts too.

    Attributes:
        by: what a step adds.
    """

    by: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.count = 0

    def post_step(self) -> None:
        self.count += self.by

    def state_dict(self) -> JsonObject:
        return {"count": self.count}

    def load_state_dict(self, state: JsonObject) -> None:
        self.count = int(state["count"])


class NoDataclass(Callback):
    """A callback that no configuration can make."""


@dataclass(kw_only=True)
class KeyedCallback(Callback):
    """Takes secrets, as a client of some service does, and says them."""

    api_key: str = ""
    hubToken: str = ""
    password: str | None = None
    eos_token: str = "</s>"
    headers: dict[str, Any] = field(default_factory=dict)

    def pre_train(self) -> None:
        logging.getLogger("keyed").warning("as %r", self)


def assert_trusted_alone(run: Path, exported: Path) -> None:
    """Who has only the checkpoint has to trust it: to write text with it, and to export it."""
    from click.testing import CliRunner

    from olm_train.extensions.generate.command import main as generate
    from olm_train.extensions.hf_export.command import main as export

    for command, rest in (
        (generate, ["--max-new-tokens", "2"]),
        (export, ["--output", str(exported)]),
    ):
        refused = CliRunner().invoke(command, [str(run), *rest])
        assert (refused.exit_code, "--trust" in refused.output) == (4, True), refused.output
        done = CliRunner().invoke(command, [str(run), *rest, "--trust"])
        assert done.exit_code == 0, done.output
