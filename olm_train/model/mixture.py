"""Mixture of experts: a router sends each token to some of many feed-forward layers.

    x [T, d] -> router, fp32 -> scores [T, E] -> top k -> slots [T k], sorted by expert
             -> experts, one product for all of them -> back in the order of tokens
             -> sum over each token's k, weighted by the scores (+ a dense expert that all pass)

No token is dropped, unless experts are given a capacity for training. Sorting, and sums over what
lies side by side, take the place of atomic additions: the same bits each time. Shapes do not depend
on where tokens go, so nothing waits for the device.

In training a layer also says what its router did (`Routed`), as an output: activation
checkpointing, which computes a layer twice, counts once. What follows for a step is
`expert_balance.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from olm_data.config.convert import Config
from olm_data.config.hints import NonNegativeFloat, NonNegativeInt, PositiveFloat
from olm_train.model.feed_forward import FeedForwardPart, GatedFeedForward, SwiGLUConfig
from olm_train.model.part import FP32, Params, Saved, Sizes, require
from olm_train.model.shards import at_home
from olm_train.model.tap import NO_TAP, Tap

ALIGNED = 8
"""Grouped products want rows of multiples of 16 bytes: so many elements of two bytes."""


class Routing(NamedTuple):
    """What the routers are to be told of a micro-batch of T tokens.

    Attributes:
        counted: bool [T]; tokens that count: those with a label.
        documents: int64 [T], number of each token's document; None: nobody asks.
        n_documents: numbers that there may be.
    """

    counted: Tensor
    documents: Tensor | None = None
    n_documents: int = 0


class Routed(NamedTuple):
    """What a router did with the tokens that count.

    Attributes:
        counts: int64 [E], tokens of each expert; their sum is k times those that count.
        scores: fp32 [E], sum of each expert's scores, of which those of a token sum to 1.
        within: fp32 scalar, sum over documents of tokens times the balance of the document:
            E sum_e (its share of the slots) (its mean score), 1 where all experts are alike. 0
            where documents were not given.
        z: fp32 scalar, sum of the squared logarithms of the routers' sums of exponentials.
        dropped: int64 scalar, of the choices in `counts` those beyond an expert's capacity.
    """

    counts: Tensor
    scores: Tensor
    within: Tensor
    z: Tensor
    dropped: Tensor


class Router(nn.Module):
    """Logits of the experts, in fp32, and a bias that has a say in the choice alone.

    The weight is rounded to the dtype of the input first, as any other, so that all layouts of
    ranks compute the same.

    Args:
        biased: have a bias; it gets no gradient and begins at 0 (DeepSeek-V3).
    """

    bias: Tensor | None

    def __init__(self, d_model: int, n_experts: int, *, biased: bool, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, d_model, **factory))
        bias = torch.zeros(n_experts, **factory | {"dtype": torch.float32}) if biased else None
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., d_model] to fp32 [..., E]."""
        weight = self.weight.to(x.dtype).to(torch.float32)
        return F.linear(x.to(torch.float32), weight)


EXPERT_TENSORS = (".experts.w_gate_up", ".experts.w_down")
"""Names of parameters of `Experts` end so."""


class Experts(nn.Module):
    """SwiGLU layers side by side: w_gate_up [E, 2 h, d], w_down [E, d, h].

    Attributes:
        parts: of each parameter the rows of each matrix in it, expert by expert.
    """

    def __init__(self, n_experts: int, d_model: int, hidden_size: int, **factory: Any) -> None:
        super().__init__()
        self.w_gate_up = nn.Parameter(torch.empty(n_experts, 2 * hidden_size, d_model, **factory))
        self.w_down = nn.Parameter(torch.empty(n_experts, d_model, hidden_size, **factory))
        self.parts = {
            "w_gate_up": (hidden_size, hidden_size) * n_experts,
            "w_down": (d_model,) * n_experts,
        }

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Map [N, d_model] to [N, d_model].

        Args:
            x: rows of the first expert, then those of the next.
            ends: int32 [E], where each expert's rows end.
        """
        # where experts are dealt to ranks, of the first E of this one
        whole = (self.w_gate_up, self.w_down)
        w_gate_up, w_down = (at_home(w).to(x.dtype).transpose(1, 2) for w in whole)
        both = F.grouped_mm(x, w_gate_up, offs=ends)
        gate, up = both.chunk(2, dim=-1)  # each [N, hidden_size]
        return F.grouped_mm(F.silu(gate) * up, w_down, offs=ends)


def _all_here(experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    return experts(rows, counts.cumsum(0).to(torch.int32))


class MixtureOfExperts(nn.Module):
    """A router, experts, and a dense layer `shared` where there is one.

    Attributes:
        through: maps experts, rows [N, d_model] sorted by expert, and int64 [E], rows of each, to
            what the experts make of the rows: wherever the experts are.
    """

    def __init__(self, config: MixtureConfig, d_model: int, **factory: Any) -> None:
        super().__init__()
        self.config = config
        biased = isinstance(config.balance, BiasBalance)
        self.router = Router(d_model, config.n_experts, biased=biased, **factory)
        self.experts = Experts(config.n_experts, d_model, config.hidden_size, **factory)
        self.through: Callable[[Experts, Tensor, Tensor], Tensor] = _all_here
        self.shared: GatedFeedForward | None = None
        if (width := config.shared_hidden_size) is not None:
            self.shared = GatedFeedForward(d_model, width, activation="silu", bias=False, **factory)

    def forward(self, x: Tensor, tap: Tap = NO_TAP, routing: Routing | None = None) -> Any:
        """Map [..., d_model] to [..., d_model]; with `routing` return (that, Routed)."""
        config, flat = self.config, x.flatten(0, -2)  # [T, d]
        logits = tap("router", self.router(x)).flatten(0, -2)  # [T, E]
        scores = logits.sigmoid() if config.scores == "sigmoid" else logits.softmax(-1)
        with torch.no_grad():
            bias = self.router.bias
            chosen = (scores if bias is None else scores + bias).topk(config.top_k).indices
        weights = scores.gather(-1, chosen)  # [T, k]
        if config.normalize_scores:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        kept = None
        if routing is not None and (factor := config.capacity_factor) is not None:
            kept = _within_capacity(chosen, weights.detach(), config.n_experts, factor)
            weights = weights * kept
        weights = (weights * config.score_scale).to(x.dtype)

        order = chosen.flatten().argsort(stable=True)  # of slots [T k]: those of an expert together
        places = inverse(order)
        rows = _ToExperts.apply(flat, order, places)  # type: ignore[no-untyped-call]
        out = self.through(self.experts, rows, _counts(chosen, config.n_experts))
        out = Reordered.apply(out, order, places)  # type: ignore[no-untyped-call]
        out = out.view(*chosen.shape, -1)  # [T, k, d]
        y = torch.bmm(weights.unsqueeze(1), out).view_as(x)
        y = tap("experts", y)
        if self.shared is not None:
            y = y + self.shared(x, tap.within("shared"))
        return y if routing is None else (y, self._routed(logits, scores, chosen, kept, routing))

    def _routed(
        self, logits: Tensor, scores: Tensor, chosen: Tensor, kept: Tensor | None, routing: Routing
    ) -> Routed:
        """Return what the router did with [T, E] logits and scores, and [T, k] choices.

        Args:
            kept: bool [T, k], the choices within capacity; None: all.
        """
        experts, counted = self.config.n_experts, routing.counted
        if self.config.scores == "sigmoid":
            scores = scores / (scores.sum(-1, keepdim=True) + TINY)
        scores = scores * counted[:, None]
        within = scores.new_zeros(())
        if routing.documents is not None:
            place = routing.documents[:, None] * experts + chosen
            slots = _counts(place, routing.n_documents * experts, counted).view(-1, experts)
            shares = slots / slots.sum(-1, keepdim=True).clamp(min=1)  # [documents, E]
            within = experts * (scores * shares[routing.documents]).sum()
        z = (logits.logsumexp(-1).square() * counted).sum()
        dropped = z.new_zeros((), dtype=torch.int64)
        if kept is not None:
            dropped = (~kept & counted[:, None]).sum()
        return Routed(_counts(chosen, experts, counted), scores.sum(0), within, z, dropped)


TINY = 1e-20
"""Added to sums of scores, which are divided by."""


def _counts(numbers: Tensor, most: int, counted: Tensor | None = None) -> Tensor:
    """Count how often each of 0 .. most - 1 is in [T, k]; int64 [most], exact in any order."""
    ones = torch.ones_like(numbers) if counted is None else counted[:, None].expand_as(numbers)
    zeros = torch.zeros(most, dtype=torch.int64, device=numbers.device)
    return zeros.scatter_add(0, numbers.flatten(), ones.flatten().to(torch.int64))


def _within_capacity(chosen: Tensor, weights: Tensor, experts: int, factor: float) -> Tensor:
    """Return which of the choices [T, k] an expert has room for, bool [T, k].

    Those of the largest weights, of equal ones the first: `--moe-token-drop-policy probs` of
    Megatron-LM, whose capacity this is, too.
    """
    slots = chosen.flatten()
    by_weight = weights.flatten().argsort(descending=True, stable=True)
    order = by_weight[slots[by_weight].argsort(stable=True)]  # by expert, then by weight
    counts = _counts(chosen, experts)
    first = (counts.cumsum(0) - counts)[slots[order]]
    place = torch.arange(len(slots), device=slots.device) - first
    room = place < math.ceil(len(slots) / experts * factor)
    return torch.empty_like(room).scatter_(0, order, room).view_as(chosen)


class _ToExperts(torch.autograd.Function):
    """Rows [T, d] of tokens -> [T k, d], sorted by expert; backward sums each token's k."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.top_k = order.numel() // x.shape[0]
        return x[order // ctx.top_k]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), (places,) = gradients, ctx.saved_tensors
        by_token = gradient[places].unflatten(0, (-1, ctx.top_k))  # [T, k, d]
        return by_token.sum(1), None, None


def inverse(order: Tensor) -> Tensor:
    """Return where each number of a permutation of 0 .. n - 1 stands in it."""
    places = torch.empty_like(order)
    return places.scatter_(0, order, torch.arange(order.numel(), device=order.device))


class Reordered(torch.autograd.Function):
    """Rows [n, d] at `places`, the inverse of `order`; backward is a look-up too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x[places]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), (order,) = gradients, ctx.saved_tensors
        return gradient[order], None, None


@dataclass(frozen=True, kw_only=True)
class BiasBalance(Config):
    """A bias for each expert, which has a say in the choice alone (DeepSeek-V3).

    After each step that of an expert with more tokens than the mean goes down, and of one with
    fewer up. The tokens are those of the whole step.

    Attributes:
        name: bias.
        rate: by how much.
    """

    name: Literal["bias"] = "bias"
    rate: PositiveFloat = 1e-3


@dataclass(frozen=True, kw_only=True)
class BalanceLoss(Config):
    """A term of the loss: E sum_e (share of the slots of expert e) (mean score of e).

    It is 1 where all experts are alike; the mean over the layers counts.

    Attributes:
        weight: what it is multiplied by.
    """

    weight: PositiveFloat = 0.01


@dataclass(frozen=True, kw_only=True)
class MicroBatchBalance(BalanceLoss):
    """The term over each micro-batch (Switch Transformer): depends on how a step is cut.

    Attributes:
        name: aux.
    """

    name: Literal["aux"] = "aux"


@dataclass(frozen=True, kw_only=True)
class DocumentBalance(BalanceLoss):
    """The term over each piece of a document in a row: does not depend on how a step is cut.

    Attributes:
        name: sequence_aux.
    """

    name: Literal["sequence_aux"] = "sequence_aux"


@dataclass(frozen=True, kw_only=True)
class StepBalance(BalanceLoss):
    """The term over all micro-batches and ranks of a step: does not depend on how it is cut.

    What the other micro-batches choose has to be known before the first backward pass: with more
    than one, each takes a forward pass more (Qiu et al., 2025, arXiv 2501.11873).

    Attributes:
        name: global_aux.
    """

    name: Literal["global_aux"] = "global_aux"


AnyBalance = BiasBalance | MicroBatchBalance | DocumentBalance | StepBalance
Number = Annotated[int, Meta(ge=1, le=1 << 14)]
Hidden = Annotated[int, Meta(ge=ALIGNED, le=1 << 21)]


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(FeedForwardPart):
    """Mixture of experts: each token passes `top_k` of `n_experts` SwiGLU layers.

    Attributes:
        name: moe.
        n_experts: of a block.
        top_k: experts that a token passes.
        hidden_size: width of each expert, a multiple of 8; so is d_model.
        shared_hidden_size: width of a dense layer that each token passes too; default: none.
        scores: of the experts for a token: "softmax", or of each by itself, "sigmoid".
        normalize_scores: divide those of the chosen ones by their sum.
        score_scale: what they are multiplied by.
        balance: keeps experts from being left idle; see below. null: nothing does.
        z_loss: weight of a term of the loss, the mean of log(sum(exp(logits)))^2 of the routers.
        capacity_factor: in training an expert takes this times tokens x top_k / n_experts tokens of
            a micro-batch, rounded up: those of the largest weights. Others pass it by. Default: as
            many as there are.
        first_dense: so many blocks at the beginning have a dense SwiGLU layer instead.
        dense_hidden_size: its width.
    """

    name: Literal["moe"] = "moe"
    n_experts: Number
    top_k: Number
    hidden_size: Hidden
    shared_hidden_size: Hidden | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize_scores: bool = False
    score_scale: PositiveFloat = 1.0
    balance: AnyBalance | None = field(default_factory=BiasBalance)
    z_loss: NonNegativeFloat = 0.0
    capacity_factor: PositiveFloat | None = None
    first_dense: NonNegativeInt = 0
    dense_hidden_size: Hidden | None = None

    routes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.top_k <= self.n_experts,
            "top_k",
            f"a token cannot pass {self.top_k} of {self.n_experts} experts",
        )
        near = -(-self.hidden_size // ALIGNED) * ALIGNED
        require(near == self.hidden_size, "hidden_size", f"is no multiple of 8; {near} is one")
        require(
            (self.first_dense > 0) == (self.dense_hidden_size is not None),
            "dense_hidden_size",
            "is the width of the first_dense blocks: give both or neither",
        )

    def check(self, sizes: Sizes) -> None:
        require(
            sizes.d_model % ALIGNED == 0,
            "d_model",
            f"experts want a multiple of 8, not {sizes.d_model}",
        )
        require(
            self.first_dense < sizes.n_layers,
            "feed_forward.first_dense",
            f"leaves none of the {sizes.n_layers} blocks with experts",
        )

    def of_layer(self, layer: int) -> FeedForwardPart:
        if layer < self.first_dense:
            return SwiGLUConfig(hidden_size=self.dense_hidden_size)
        return self

    def build(self, sizes: Sizes, **factory: Any) -> nn.Module:
        return MixtureOfExperts(self, sizes.d_model, **factory)

    def active(self, sizes: Sizes) -> Params:
        whole = super().active(sizes)
        expert = 3 * self.hidden_size * sizes.d_model
        return whole._replace(matrices=whole.matrices - (self.n_experts - self.top_k) * expert)

    def kept(self, sizes: Sizes, saved: Saved) -> float:
        # a slot: its input; gate and up, act(gate), their product; its output. Four numbers a slot
        # of 8 bytes: expert, order, place twice
        slot = saved.itemsize * (2 * sizes.d_model + 4 * self.hidden_size) + 8 * 4
        shared = saved.itemsize * 4 * (self.shared_hidden_size or 0)
        # the input in fp32, if it was not; logits and scores
        router = (FP32 * sizes.d_model if saved.itemsize < FP32 else 0) + 2 * FP32 * self.n_experts
        return self.top_k * slot + shared + router

    def products(self, sizes: Sizes) -> int:
        shared = 2 * self.shared_hidden_size + sizes.d_model if self.shared_hidden_size else 0
        slots = self.top_k * (2 * self.hidden_size + sizes.d_model)
        return self.n_experts + slots + sizes.d_model + shared
