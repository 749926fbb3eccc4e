"""Tensor parallelism: ranks that read the same rows share each product of matrices, and have other
tokens between the products (sequence parallelism).

    tokens of a rank --all-gather--> all tokens --rows of a matrix--> some heads, or hidden units
                     <--reduce-scatter, sum-- their part of the output <--columns of the next one--

    w_qkv, w_gate_up, w_up      by rows, each of the parts they hold: q, k, v; gate, up
    w_out, w_down               by columns
    embeddings, lm_head         by rows, each of an id: no rank has all logits
    norms, routers, experts     not at all: FSDP2 cuts them over these ranks too, as the tokens are

Fewer heads of keys than ranks: each rank has some rows of a head, and those that share it put the
keys and values together.

What the losses of ranks add up to is the loss: each reports its share of the sums, as it does of
tokens. Source: Megatron-LM (Shoeybi et al., 2019; Korthikanti et al., 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from olm_data.errors import UsageError
from olm_train.distributed.world import World, gathered
from olm_train.model.attention import Attention
from olm_train.model.decoder import Decoder
from olm_train.model.feed_forward import FeedForward, GatedFeedForward
from olm_train.model.head import Head
from olm_train.model.layers import LinearLayer
from olm_train.model.loss import IGNORE_INDEX, LossSums
from olm_train.model.loss_chunked import chunked_loss
from olm_train.model.loss_config import LossChoice
from olm_train.model.norm import LayerNorm, RMSNorm
from olm_train.model.precision import at_least_fp32, wide
from olm_train.model.shards import TENSOR, at_home, local_part, with_parts
from olm_train.parallel.context import require_divisible
from olm_train.parallel.exchange import both_ways, device_mesh
from olm_train.parallel.expert import placements
from olm_train.parallel.mesh import CUT, Mesh, divisors, require_as_many

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

T = TypeVar("T")
WHERE = "train_module.tp_config.degree"


@dataclass(frozen=True)
class Ranks:
    """Ranks that exchange parts of tensors, which lie one after another along a dimension.

    Attributes:
        group: of the ranks.
        rank: this one's number among them.
        degree: how many.
    """

    group: dist.ProcessGroup
    rank: int
    degree: int

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """[b, n / degree, ...] -> [b, n, ...]; a gradient is summed over the ranks."""
        return both_ways(x, lambda x: self.collect(x, dim)(), lambda g: self.sum_up(g, dim)())

    def scatter(self, x: Tensor) -> Tensor:
        """[b, n, ...], other values on each rank -> [b, n / degree, ...], their sum."""
        return both_ways(x, lambda x: self.sum_up(x)(), lambda g: self.collect(g)())

    def total(self, x: Tensor) -> Tensor:
        """Other values on each rank -> their sum, on each; so is the gradient."""
        return both_ways(x, self.add, self.add)

    def own(self, x: Tensor) -> Tensor:
        """[b, n, ...] -> [b, n / degree, ...]."""
        return x.chunk(self.degree, 1)[self.rank]

    # Without a gradient.

    def collect(self, x: Tensor, dim: int = 1) -> Callable[[], Tensor]:
        """Begin to gather; return what waits for it, and returns the tensor."""
        sent = x.contiguous()
        parts = x.new_empty((self.degree * x.shape[0], *x.shape[1:]))
        work = dist.all_gather_single(parts, sent, group=self.group, async_op=True)

        def found(kept: Tensor = sent) -> Tensor:  # its memory is read until then
            work.wait()
            by_rank: Tensor = parts.unflatten(0, (self.degree, -1))
            return by_rank.movedim(0, dim).flatten(dim, dim + 1)

        return found

    def sum_up(self, x: Tensor, dim: int = 1) -> Callable[[], Tensor]:
        """Begin to scatter; return what waits for it, and returns the tensor."""
        sent = x.unflatten(dim, (self.degree, -1)).movedim(dim, 0).contiguous()
        own = torch.empty_like(sent[0])
        work = dist.reduce_scatter_single(own, sent.flatten(0, 1), group=self.group, async_op=True)

        def found(kept: Tensor = sent) -> Tensor:
            work.wait()
            return own

        return found

    def add(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Return the sum over the ranks, or what else `op` says; the same bits on each."""
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, op=op, group=self.group)
        return out


class Products:
    """Those of a linear layer forward and backward, of weights [out, in]."""

    def out(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, weight, bias)

    def of_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """[..., out] -> [..., in]."""
        return grad @ weight

    def of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """[n, out], [n, in] -> [out, in]."""
        return grad.t() @ x


PLAIN = Products()


class _ByRows(torch.autograd.Function):
    """(tokens of this rank [b, s, in], rows of a matrix, of a bias) -> [b, S, rows].

    Tokens of all ranks are gathered again for the gradient of the rows, and kept in between by
    none; that, and the sum of their own gradient, run beside the products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ranks: Ranks,
        products: Products,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ranks, ctx.products, ctx.biased = ranks, products, bias is not None
        return products.out(ranks.collect(x)(), weight, bias)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = upstream, ctx.saved_tensors
        tokens = ctx.ranks.collect(x)
        x_grad = ctx.ranks.sum_up(ctx.products.of_input(grad, weight))
        flat = grad.flatten(0, -2)
        weight_grad = ctx.products.of_weight(flat, tokens().flatten(0, -2))
        return x_grad(), weight_grad, flat.sum(0) if ctx.biased else None, None, None


class _ByColumns(torch.autograd.Function):
    """(x [b, S, columns], columns of a matrix) -> this rank's part of the sum, [b, S, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Products) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products = products
        return products.out(x, weight, None)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,), (x, weight) = upstream, ctx.saved_tensors
        x_grad = ctx.products.of_input(grad, weight)
        return x_grad, ctx.products.of_weight(grad.flatten(0, -2), x.flatten(0, -2)), None


@dataclass(frozen=True)
class ByRows:
    """The product of a matrix that is cut by rows.

    Attributes:
        ranks: it is cut over.
        sharers: those that have rows of the same heads of keys and values; None: this one alone.
        keys: rows of keys, and as many of values, that each has; the last ones of the matrix.
        products: how it is multiplied.
    """

    ranks: Ranks
    sharers: Ranks | None = None
    keys: int = 0
    products: Products = PLAIN

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Map [b, s, in] to [b, S, rows of this rank], and of those that share heads with it."""
        rows = None if bias is None else at_home(bias).to(x.dtype)
        out: Tensor = _ByRows.apply(  # type: ignore[no-untyped-call]
            x, at_home(weight).to(x.dtype), rows, self.ranks, self.products
        )
        if self.sharers is None:
            return out
        queries, both = out.tensor_split([out.shape[-1] - 2 * self.keys], dim=-1)
        heads = self.sharers.gather(both.unflatten(-1, (2, -1)), 3)  # [b, S, 2, D]
        return torch.cat((queries, heads.flatten(2)), dim=-1)


@dataclass(frozen=True)
class ByColumns:
    """The product of a matrix that is cut by columns over `ranks`, multiplied by `products`."""

    ranks: Ranks
    products: Products = PLAIN

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Map [b, S, columns of this rank] to [b, s, out]."""
        out = self.ranks.scatter(
            _ByColumns.apply(x, at_home(weight).to(x.dtype), self.products)  # type: ignore[no-untyped-call]
        )
        return out if bias is None else out + bias.to(x.dtype)


@dataclass(frozen=True)
class LookUp:
    """A table that is cut by rows over `ranks`, each of an id; or that each has whole."""

    ranks: Ranks

    def __call__(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Map ids [b, S] to [b, s, d_model]."""
        if not isinstance(weight, DTensor):
            return F.embedding(self.ranks.own(ids), weight)
        table = weight.to_local()
        place = ids - self.ranks.rank * len(table)
        here = (place >= 0) & (place < len(table))
        rows = F.embedding(place.where(here, 0), table)
        return self.ranks.scatter(rows.where(here[..., None], 0))


@dataclass(frozen=True)
class OverAll:
    """The norm of heads on all `ranks`, at once."""

    ranks: Ranks

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, norm: RMSNorm | LayerNorm, x: Tensor) -> Tensor:
        """Normalise [b, S, size of what is here]."""
        size, here, own = norm.weight.numel(), x.shape[-1], at_least_fp32(x)
        copies = here * self.ranks.degree // size  # of each head, on ranks one after another
        first = self.ranks.rank // copies * here
        if isinstance(norm, LayerNorm):
            own = own - self.ranks.total(own.sum(-1, keepdim=True)) / (copies * size)
        squares = self.ranks.total(own.square().sum(-1, keepdim=True)) / (copies * size)
        weight: Tensor = norm.weight
        bias = getattr(norm, "bias", None)
        if getattr(norm, "zero_centred", False):
            weight = 1 + at_least_fp32(weight)
        own = own * (squares + norm.eps).rsqrt() * weight.to(x.dtype)[first : first + here]
        return (own if bias is None else own + bias[first : first + here]).to(x.dtype)


class _PartOfHead(Head):
    """The rows of a head that are here, of `vocab_size` ids."""

    def logits(self, x: Tensor) -> Tensor:
        raise UsageError(
            "each rank has logits of some ids alone",
            where="train_module.tp_config",
            why="the vocabulary is cut over ranks",
            fix="leave it out, or what asks for all logits",
        )


class _CrossEntropy(torch.autograd.Function):
    """As `loss._CrossEntropy`, of logits [n, ids of this rank]; its labels are those of all ids."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        z_multiplier: float,
        ranks: Ranks,
        first: int,
    ) -> tuple[Tensor, ...]:
        exp = logits.to(wide(logits.dtype), copy=True)
        here = (labels >= first) & (labels < first + logits.shape[1])
        place = (labels - first).where(here, 0)[:, None]
        largest = exp.new_full((len(exp), 1), -torch.inf)
        if exp.shape[1]:  # there may be rows that pad the vocabulary, and no others
            largest = exp.amax(1, keepdim=True)
        largest = ranks.add(largest, dist.ReduceOp.MAX)
        exp.sub_(largest)
        chosen = exp.gather(1, place) if exp.shape[1] else torch.zeros_like(largest)
        chosen = chosen.where(here[:, None], 0)
        sums, chosen = ranks.add(torch.stack((exp.exp_().sum(1, keepdim=True), chosen)))
        valid = (labels != IGNORE_INDEX)[:, None]
        logs = sums.log()
        by_label = (logs - chosen).where(valid, 0)[:, 0]
        normaliser = (largest + logs).where(valid, 0)  # [n, 1]
        share = valid if weights is None else weights[:, None].where(valid, 0).to(exp.dtype)
        ctx.save_for_backward(exp.div_(sums), place, here[:, None], share, normaliser)
        ctx.dtype, ctx.z_multiplier = logits.dtype, z_multiplier
        z = z_multiplier * (share * normaliser.square()).sum()
        total = (share[:, 0] * by_label).sum()
        others = (total.clone(), z, by_label)
        ctx.mark_non_differentiable(*others)
        return (total + z, *others)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        p, place, here, share, normaliser = ctx.saved_tensors
        scale = upstream[0] * share  # [n, 1]
        grad = p.mul_(scale * (1 + 2 * ctx.z_multiplier * normaliser))
        if grad.shape[1]:
            grad.scatter_add_(1, place, -scale * here)
        return grad.to(ctx.dtype), *(None,) * 5


class TensorParallel:
    """Cuts a decoder on the device "meta", and computes losses of a vocabulary that is cut.

    Args:
        model: the decoder; its parameters that are cut become DTensors over the ranks.
        choice: of the loss.
        mesh: of the run.
        world: every rank of it calls this.

    Attributes:
        ranks: those that share products of matrices with this one.
        placement: see `expert.placements`.

    Raises:
        UsageError: the model or the loss does not fit.
    """

    def __init__(self, model: Decoder, choice: LossChoice, mesh: Mesh, world: World) -> None:
        require_cuttable(model, choice, mesh)
        self._choice, config = choice, model.config
        sizes = {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.degree(*CUT.sharded)}
        self._mesh = device_mesh(mesh, world, {**sizes, TENSOR: mesh.tp})
        own = mesh.group(world.rank, "tp")
        self.ranks = Ranks(self._mesh.get_group(TENSOR), own.index(world.rank), mesh.tp)
        self.placement: Callable[[nn.Parameter], ShardPlacementResult | None] = placements(
            self._mesh, TENSOR, Shard(0)
        )
        self._parts: list[tuple[nn.Module, str, tuple[int, ...] | None]] = []
        copies = max(1, mesh.tp // config.kv_heads)
        sharers = _sharers(mesh, world.rank, copies) if copies > 1 else None
        model.embeddings.look_up = LookUp(self.ranks)
        if model.position_embeddings is not None:
            model.position_embeddings.look_up = LookUp(self.ranks)
        for table in (model.embeddings, model.lm_head):
            if table is not None:
                self._cut(table, "weight", Shard(0), (config.padded_vocab_size,))
        model.make_head = self._head
        self._first = self.ranks.rank * (config.padded_vocab_size // mesh.tp)
        for attention in _attentions(model):
            keys = attention.w_qkv.parts[1] // mesh.tp
            self._by_rows(attention.w_qkv, ByRows(self.ranks, sharers, keys))
            self._by_columns(attention.w_out)
            queries, kv_heads, _ = (max(1, heads // mesh.tp) for heads in attention.heads)
            attention.heads = (queries, kv_heads, kv_heads)
            attention.over_all = OverAll(self.ranks)
        for layer in _dense(model):
            up = layer.w_gate_up if isinstance(layer, GatedFeedForward) else layer.w_up
            self._by_rows(up, ByRows(self.ranks))
            self._by_columns(layer.w_down)

    def _by_rows(self, linear: LinearLayer, product: ByRows) -> None:
        linear.product = product
        for name, _ in list(linear.named_parameters()):
            self._cut(linear, name, Shard(0), linear.parts)

    def _by_columns(self, linear: LinearLayer) -> None:
        linear.product = ByColumns(self.ranks)
        self._cut(linear, "weight", Shard(1))

    def _cut(
        self, module: nn.Module, name: str, how: Shard, parts: tuple[int, ...] | None = None
    ) -> None:
        """Leave this rank its part of a parameter: of each of its parts, if it is cut by rows."""
        self._parts.append((module, name, parts))
        whole: nn.Parameter = getattr(module, name)
        own = local_part(whole).chunk(self.ranks.degree, how.dim)[0].clone()
        mine = DTensor.from_local(own, self._mesh[TENSOR], [how], run_check=False)
        setattr(module, name, nn.Parameter(mine, requires_grad=whole.requires_grad))

    def _head(self, weight: Tensor, vocab_size: int, softcap: float | None) -> Head:
        rows = at_home(weight)
        return _PartOfHead(rows, min(max(vocab_size - self._first, 0), len(rows)), softcap)

    def settle(self) -> None:
        """Tell the parameters, as FSDP2 has made them, the order of their rows."""
        for module, name, parts in self._parts:
            with_parts(getattr(module, name), parts)

    def loss(
        self, head: Head, x: Tensor, labels: Tensor, weights: Tensor | None = None
    ) -> LossSums:
        """The loss that was chosen, of states [b, s, d_model], labels [b, s] and their weights.

        Returns:
            What is differentiated is that of the tokens of all ranks: each has the gradient of a
            part of the head. All else is this rank's share.
        """
        every, degree = self.ranks.collect(labels)(), self.ranks.degree
        weights = None if weights is None else self.ranks.collect(weights)()
        found = self._sums(head, x, every, weights, self._choice.tokens_at_once(on_cpu=x.is_cpu))
        by_label = found.by_label
        return found._replace(
            cross_entropy=found.cross_entropy / degree,
            z=None if found.z is None else found.z / degree,
            by_label=None
            if by_label is None
            else self.ranks.own(by_label.view_as(every)).flatten(),
        )

    def _sums(
        self,
        head: Head,
        x: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        chunk_size: int | None,
    ) -> LossSums:
        """The sums of states of this rank, and labels and weights of all."""
        multiplier = self._choice.z_loss_multiplier

        def sums(logits: Tensor, labels: Tensor, weights: Tensor | None) -> LossSums:
            total, cross_entropy, z, by_label = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
                logits, labels, weights, multiplier or 0.0, self.ranks, self._first
            )
            return LossSums(total, cross_entropy, None if multiplier is None else z, by_label)

        chunked = chunked_loss(sums, chunk_size or labels.numel())
        return chunked(Head(*head), self.ranks.gather(x), labels, weights)

    @torch.no_grad()
    def by_label(
        self,
        head: Head,
        x: Tensor,
        labels: Tensor,
        chunk_size: int | None,
        *,
        fp32_logits: bool = False,
    ) -> Tensor:
        """As `by_label_chunked`, of states of this rank, and labels of all."""
        if fp32_logits:
            head, x = head._replace(weight=at_least_fp32(head.weight)), at_least_fp32(x)
        found = self._sums(head, x, labels, None, chunk_size).by_label
        assert found is not None
        return found.view_as(labels)

    def in_turn(self, given: T, compute: Callable[[T], Tensor]) -> Tensor:
        """Compute something of what each rank has, together; return what is of this one's."""
        return [compute(each) for each in gathered(given, self.ranks.group)][self.ranks.rank]


def _sharers(mesh: Mesh, rank: int, copies: int) -> Ranks:
    """Return the ranks that share heads of keys with a rank; all ranks call it."""
    found: Ranks | None = None
    for group in mesh.groups("tp"):
        for first in range(0, mesh.tp, copies):
            ranks = group[first : first + copies]
            made = dist.new_group(list(ranks))
            if rank in ranks:
                found = Ranks(made, ranks.index(rank), copies)
    assert found is not None
    return found


def require_cuttable(model: Decoder, choice: LossChoice, mesh: Mesh) -> None:
    """Refuse a model that cannot be cut over the ranks of a mesh, or a loss that wants all logits.

    Raises:
        UsageError: why, and what to set instead.
    """
    config, degree, kv = model.config, mesh.tp, model.config.kv_heads
    if choice.own is not None or choice.labels_apart:
        raise UsageError(
            f"the loss {choice.name} wants all logits on each rank",
            where="train_module.loss",
            why="with tp_config the vocabulary is cut over ranks",
            fix="set loss.name: chunked, or leave tp_config out",
        )
    require_divisible(model, "tp_config", "be cut over ranks", degree)
    for attention in _attentions(model):
        norm = attention.q_norm
        if attention.norm_whole and type(norm) not in (RMSNorm, LayerNorm):
            raise UsageError(
                f"a norm by {type(norm).__name__} cannot be taken over heads on several ranks",
                where="model.attention.qk_norm",
                fix="set it to head, or leave tp_config out",
            )
    require_as_many(degree, config.n_heads, "query heads of a block", WHERE)
    if degree % kv and kv % degree:
        fits = [n for n in divisors(config.n_heads)[1:] if not (n % kv and kv % n)]
        raise UsageError(
            f"degree {degree} neither divides the {kv} heads of keys and values, nor they it",
            where=WHERE,
            why="ranks have as many heads each, or as many ranks share each head",
            fix=f"set it to one of {', '.join(map(str, fits))}",
        )
    copies = max(1, degree // kv)
    shared = "entries of a head of keys, of which as many ranks share it"
    require_as_many(copies, config.head_size, shared, WHERE)
    for layer in _dense(model):
        hidden = layer.w_down.weight.shape[1]
        require_as_many(degree, hidden, "hidden units of a feed-forward layer", WHERE)
    if config.padded_vocab_size % degree:
        raise UsageError(
            f"degree {degree} does not divide the {config.padded_vocab_size:,} rows of the "
            "embedding table",
            where="model.vocab_multiple",
            fix=f"set it to {degree} or a multiple of it: rows are added that no id has",
        )


def _attentions(model: Decoder) -> list[Attention]:
    found: list[Any] = [getattr(block, "attention", None) for block in model.blocks]
    return found


def _dense(model: Decoder) -> list[GatedFeedForward | FeedForward]:
    """Return the feed-forward layers that can be cut; others compute token by token."""
    layers = [getattr(block, "feed_forward", None) for block in model.blocks]
    return [layer for layer in layers if isinstance(layer, (GatedFeedForward, FeedForward))]
