"""Which loss a run takes: named, or chosen by the memory its logits would need.

    LossConfig, model, tokens of a micro-batch --choose--> LossChoice --build--> Loss

Under one configuration the choice is the same on every machine: it depends on sizes alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from olm_data.config.convert import Config
from olm_data.config.hints import Needs, PositiveFloat, PositiveInt
from olm_data.config.import_path import import_path
from olm_data.errors import UsageError
from olm_train.model.compiled import CompiledByKind
from olm_train.model.config import DecoderConfig
from olm_train.model.head import Head
from olm_train.model.loss import IGNORE_INDEX, LOGITS_BYTES, Loss, LossSums, loss_sums
from olm_train.model.loss_chunked import chunked_loss
from olm_train.model.precision import at_least_fp32

Name = Literal["auto", "plain", "compiled", "chunked", "linear_cross_entropy"]
CHUNKED = ("chunked", "linear_cross_entropy")
CHUNK_SIZE = 4096
CPU_CHUNK = 256
"""Tokens whose logits the plain loss holds at once on a CPU: they stay in its cache."""
MAX_LOGITS_GB = 16.0


@dataclass(frozen=True)
class LossChoice:
    """The loss of a run.

    Attributes:
        name: of the implementation, never "auto".
        why: what it was chosen by, for the log.
        chunk_size: see `tokens_at_once`, on any device.
        z_loss_multiplier: of the z-loss, None: there is none.
        compiled: whether the part after the logits is compiled.
        own: a loss of the user's own, which takes the place of all that.
    """

    name: str
    why: str
    chunk_size: int | None
    z_loss_multiplier: float | None
    compiled: bool
    own: OwnLoss | None = None

    @property
    def labels_apart(self) -> bool:
        """Whether the losses of single labels cost a pass of their own (`with_labels`)."""
        return self.own is None and self.name == "linear_cross_entropy"

    def require_weighing(self) -> None:
        """Refuse to weigh labels, as the `loss_weight` of a source asks for.

        Raises:
            UsageError: this loss gives one sum over all labels.
        """
        if self.own is not None or self.name == "linear_cross_entropy":
            raise UsageError(
                f"the loss {self.name} does not weigh labels, and the lock has loss weights",
                where="train_module.loss.name",
                why="it gives one sum over all labels",
                fix="use name: chunked, or leave loss_weight out of the manifest",
            )

    def build(self) -> Loss:
        """Return the function."""
        if self.own is not None:
            return self.own.sums
        if self.name == "linear_cross_entropy":
            return _linear_cross_entropy
        sums: Callable[[Tensor, Tensor, float | None, Tensor | None], LossSums] = loss_sums
        if self.compiled:
            sums = CompiledByKind(loss_sums)
        multiplier = self.z_loss_multiplier
        in_chunks = chunked_loss(
            lambda logits, labels, weights: sums(logits, labels, multiplier, weights),
            self.chunk_size or CPU_CHUNK,
        )

        def loss(head: Head, x: Tensor, labels: Tensor, weights: Tensor | None = None) -> LossSums:
            if self.tokens_at_once(on_cpu=x.is_cpu) is not None:
                return in_chunks(head, x, labels, weights)
            return sums(head.logits(x), labels, multiplier, weights)

        return loss

    def tokens_at_once(self, *, on_cpu: bool) -> int | None:
        """Return how many tokens' logits exist at once, None: those of the whole micro-batch."""
        plain = self.own is None and self.name == "plain"
        return self.chunk_size or (CPU_CHUNK if on_cpu and plain else None)


class OwnLoss(Config, ABC):
    """Base of a loss of your own: a frozen dataclass, named `module:Class` in train.yaml."""

    @abstractmethod
    def sums(self, head: Head, x: Tensor, labels: Tensor) -> LossSums:
        """Return the sums of a micro-batch, which is divided by the step's number of labels.

        With a fourth argument `context` it is also given the model and a place for its terms, see
        `loss_context.LossContext`: `def sums(self, head, x, labels, context=None)`.

        Args:
            head: gives logits [b, S, V] of the states: `head.logits(x)`.
            x: normalised states [b, S, d_model].
            labels: int64 [b, S]; `IGNORE_INDEX` where there is none.
        """

    def choose(self, model: DecoderConfig, *, microbatch: int, compiling: bool) -> LossChoice:
        """Choose this loss; see `LossConfig.choose`."""
        path = import_path(type(self))
        return LossChoice(path, "named in the configuration", None, None, False, self)


@dataclass(frozen=True, kw_only=True)
class LossConfig(Config):
    """The loss: cross entropy and, on request, a z-loss.

    Attributes:
        name: implementation, see below: "auto", "plain", "compiled", "chunked" or
            "linear_cross_entropy" (torch's own chunked one).
        z_loss_multiplier: adds this times log(sum(exp(logits)))^2 of each label; logged as `train/Z
            loss`.
        chunk_size: "chunked", also where "auto" takes it: tokens whose logits exist at once.
            Default: 4096.
        max_logits_gb: "auto": 10^9 bytes of logits and their gradients from which on they are
            computed in chunks. Default: 16.
    """

    name: Name = "auto"
    z_loss_multiplier: Annotated[
        PositiveFloat | None, Needs("name", unless="linear_cross_entropy")
    ] = None
    chunk_size: PositiveInt | None = None
    max_logits_gb: Annotated[PositiveFloat | None, Needs("name", value="auto")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_size is not None and self.name not in ("auto", "chunked"):
            raise UsageError(
                f"the {self.name} loss has no chunks", where="chunk_size", fix="use name: chunked"
            )

    def choose(self, model: DecoderConfig, *, microbatch: int, compiling: bool) -> LossChoice:
        """Choose the implementation.

        Args:
            model: shape of the model.
            microbatch: tokens a rank takes through forward and backward at once.
            compiling: whether the blocks are compiled: then "auto" and "chunked" compile the part
                after the logits too.

        Raises:
            UsageError: the named one cannot compute this model's loss.
        """
        size = microbatch * model.vocab_size * LOGITS_BYTES / 1e9
        name, why = self.name, "named in the configuration"
        if name == "auto":
            limit = self.max_logits_gb or MAX_LOGITS_GB
            name = "chunked" if size > limit else "compiled" if compiling else "plain"
            sign = ">" if size > limit else "<="
            why = f"logits of a micro-batch need {size:.3g} GB {sign} max_logits_gb {limit:g}"
        if name == "linear_cross_entropy" and (
            model.head.softcap is not None or model.padded_vocab_size != model.vocab_size
        ):
            why = "torch's linear_cross_entropy knows no head.softcap and no padded vocabulary"
            raise UsageError(
                f"loss.name: {why}", where="train_module.loss.name", fix="use name: chunked"
            )
        return LossChoice(
            name,
            why,
            (self.chunk_size or CHUNK_SIZE) if name in CHUNKED else None,
            self.z_loss_multiplier,
            compiled=name == "compiled" or (name == "chunked" and compiling),
        )


def _linear_cross_entropy(head: Head, x: Tensor, labels: Tensor) -> LossSums:
    loss = F.linear_cross_entropy(
        x.flatten(0, 1),
        head.weight,
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        options=torch.nn.LinearCrossEntropyOptions(),
    )
    loss = at_least_fp32(loss)
    return LossSums(loss, loss.detach(), None)
