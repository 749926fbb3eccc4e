"""Context parallelism: ranks that share a micro-batch exchange what attention needs of each other.

    gather    every rank gets all keys and values, and attends with its own queries
    needed    likewise, but of the keys and values only those that its queries attend to
    ulysses   every rank gets all tokens of its part of the heads, attends to them as one rank
              does, and sends back what the others' tokens make of it

All else is computed token by token. Tokens are dealt by `data/dealing.py`, and come from every rank
in that order; here they are put into the order of the micro-batch. The gradient of what came from
other ranks is sent back to them and summed there.

Sources: DeepSpeed Ulysses (Jacobs et al., 2023); keys gathered as for Llama 3 (2024, 3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from olm_data.errors import UsageError, ValidationError
from olm_train.data.batch import Need
from olm_train.data.dealing import ContextShare
from olm_train.distributed.world import World
from olm_train.model.attention import Attention
from olm_train.model.attention_backend import (
    Attend,
    DocumentLayout,
    KeySource,
    Queries,
    Scores,
)
from olm_train.model.decoder import Decoder
from olm_train.model.mixture import DocumentBalance, MixtureConfig
from olm_train.parallel.config import ContextParallelConfig
from olm_train.parallel.exchange import both_ways, new_groups, send_rows
from olm_train.parallel.mesh import Mesh, divisors


@dataclass(frozen=True)
class Exchange:
    """The ranks that share a micro-batch, and where its tokens lie in the order they come in.

    Attributes:
        group: of the ranks.
        order: int64 [T], places of the first rank's tokens, then of the second's, and so on.
        rank: this one's number in the group.
        degree: ranks.
        shape: b, S of the micro-batch.
    """

    group: dist.ProcessGroup
    order: Tensor
    rank: int
    degree: int
    shape: tuple[int, int]

    @property
    def own(self) -> Tensor:
        """int64 [n], places of this rank's tokens."""
        return self.order.chunk(self.degree)[self.rank]

    def all_tokens(self, x: Tensor) -> Tensor:
        """[1, n, ...] of this rank's tokens -> [1, T, ...] of all."""
        return both_ways(x[0], self.collect, self.sum_up)[None]

    def own_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Each [1, n, H, D], all heads of this rank's tokens -> [b, S, H / degree, D]."""
        cut = [x[0].unflatten(1, (self.degree, -1)) for x in parts]  # [n, degree, heads, D]
        out = both_ways(torch.cat(cut, dim=2), self.to_heads, self.to_tokens)
        sizes = [x.shape[2] for x in cut]
        return [x.unflatten(0, self.shape) for x in out.split(sizes, dim=1)]

    def own_tokens(self, x: Tensor) -> Tensor:
        """[b, S, H / degree, D] -> [1, n, H, D]."""
        out = both_ways(x.flatten(0, 1), self.to_tokens, self.to_heads)
        return out.flatten(1, 2)[None]

    # Without a gradient; `x` as what comes out of the others, without the first axis.

    def collect(self, x: Tensor) -> Tensor:
        """[n, ...] -> [T, ...]."""
        parts = x.new_empty((len(self.order), *x.shape[1:]))
        dist.all_gather_single(parts, x.contiguous(), group=self.group)
        return self._in_order(parts)

    def sum_up(self, x: Tensor) -> Tensor:
        """[T, ...], other values on each rank -> [n, ...], their sum at this rank's tokens."""
        own = x.new_empty((len(self.order) // self.degree, *x.shape[1:]))
        # an index keeps strides of its input, and a collective takes memory as it lies
        dist.reduce_scatter_single(own, x.index_select(0, self.order), group=self.group)
        return own

    def to_heads(self, x: Tensor) -> Tensor:
        """[n, degree, h, D] -> [T, h, D]."""
        sent = x.transpose(0, 1).contiguous()
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.group)
        return self._in_order(got.flatten(0, 1))

    def to_tokens(self, x: Tensor) -> Tensor:
        """[T, h, D] -> [n, degree, h, D]."""
        sent = x.index_select(0, self.order)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.group)
        parts: Tensor = got.unflatten(0, (self.degree, -1))
        return parts.transpose(0, 1).contiguous()

    def _in_order(self, x: Tensor) -> Tensor:
        found: Tensor = torch.empty_like(x).index_copy_(0, self.order, x)
        return found


@dataclass(frozen=True)
class Spared(Exchange):
    """An exchange in which a rank gets no other tokens than it needs: 0 stands for these.

    Attributes:
        need: of the layer's window.
    """

    need: Need

    def collect(self, x: Tensor) -> Tensor:
        got = send_rows(x.index_select(0, self.need.sent), self.need.to, self.need.of, self.group)
        found = x.new_zeros((len(self.order), *x.shape[1:]))
        return found.index_copy_(0, self.own, x).index_copy_(0, self.need.got, got)

    def sum_up(self, x: Tensor) -> Tensor:
        back = send_rows(x.index_select(0, self.need.got), self.need.of, self.need.to, self.group)
        own: Tensor = x.index_select(0, self.own)
        parts = zip(self.need.sent.split(self.need.to), back.split(self.need.to), strict=True)
        for places, part in parts:  # no place twice in one: the order of sums is that of ranks
            own.index_add_(0, places, part)
        return own


@dataclass(frozen=True)
class _Exchanged(KeySource):
    """The context of a layer.

    Attributes:
        exchange: of the micro-batch.
        context: what the back-end prepared.
        of_heads: whether it is given all tokens of some heads, not all keys of some tokens.
    """

    exchange: Exchange
    context: Any
    of_heads: bool

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(self, k: Tensor) -> Tensor:
        return self.exchange.all_tokens(k)[:, (self.exchange.own - 1).clamp(min=0)]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, own: Attend, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        if self.of_heads:
            q, k, v = self.exchange.own_heads((q, k, v))
            return self.exchange.own_tokens(own(q, k, v, self.context, scores))
        both = self.exchange.all_tokens(torch.cat((k, v), dim=2))  # [1, T, 2 K, D]
        keys, values = both.chunk(2, dim=2)
        return own(q, keys, values, self.context, scores)


class ContextParallel:
    """What a decoder needs to compute a part of the tokens of each micro-batch.

    Args:
        config: degree and exchange.
        model: the decoder.
        mesh: of the run.
        world: every rank of it calls this.

    Raises:
        UsageError: the model has what needs a whole row on each rank.
    """

    def __init__(
        self, config: ContextParallelConfig, model: Decoder, mesh: Mesh, world: World
    ) -> None:
        require_tokens_alone(config, model, mesh.tp)
        self.config, self._model = config, model
        ranks, self._group = new_groups(mesh, world, "cp")
        self.rank = ranks.index(world.rank)

    def exchange(self, share: ContextShare, need: Need | None = None) -> Exchange:
        """Return the exchange of a micro-batch.

        Args:
            need: what ranks are to get; None: all.
        """
        rows, length = share.whole.input_ids.shape
        of_all = self._group, share.places.flatten(), self.rank, self.config.degree, (rows, length)
        return Exchange(*of_all) if need is None else Spared(*of_all, need)

    def contexts(self, share: ContextShare) -> list[KeySource]:
        """Return the contexts of the layers, for one forward pass and its backward pass."""
        whole, of_heads = share.whole, self.config.exchange == "ulysses"
        doc_start, cu_seqlens, max_seqlen = whole.doc_start, whole.cu_seqlens, whole.max_seqlen
        if of_heads:
            found = self._model.contexts(whole.input_ids, doc_start, cu_seqlens, max_seqlen)
        else:
            rows, length = doc_start.shape
            row = torch.arange(0, rows * length, length, device=doc_start.device)
            begins = (doc_start + row[:, None]).flatten()
            own = share.places[self.rank]
            queries = Queries(own, begins[own.flatten()].view_as(own), rows * length)
            found = self._model.prepared(
                DocumentLayout(None, cu_seqlens, max_seqlen, queries=queries)
            )
        windows = self._model.config.windows
        exchanges = {w: self.exchange(share, whole.needs.get(w)) for w in dict.fromkeys(windows)}
        pairs = zip(windows, found, strict=True)
        return [_Exchanged(exchanges[w], context, of_heads) for w, context in pairs]


def require_tokens_alone(config: ContextParallelConfig, model: Decoder, tp: int = 1) -> None:
    """Refuse a model that `config` cannot spread.

    Args:
        tp: ranks that the heads are cut over.

    Raises:
        UsageError: what it has, and what to set instead.
    """
    shape, where = model.config, "train_module.cp_config"
    require_divisible(model, "cp_config", "exchange keys between ranks", config.degree)
    heads = max(1, shape.kv_heads // tp)
    if config.exchange == "ulysses" and heads % config.degree:
        fitting = [str(n) for n in divisors(heads) if n > 1]
        raise UsageError(
            f"{config.degree} ranks cannot have as many each of {heads} heads of keys",
            where=f"{where}.degree",
            why="the exchange ulysses deals heads to ranks",
            fix=(f"set it to {' or '.join(fitting)}, or " if fitting else "")
            + "set cp_config.exchange: gather",
        )


def require_divisible(model: Decoder, option: str, what: str, degree: int) -> None:
    """Refuse a model whose attention or experts do not do with a part of the tokens on each rank.

    Args:
        option, what: that asks for it, and what attention has to do.
        degree: ranks that a document may lie on.

    Raises:
        UsageError: what the model has, and what to set instead.
    """
    for block in model.blocks:
        kind = type(getattr(block, "attention", None))
        if getattr(kind, "forward", None) is not Attention.forward:
            raise UsageError(
                f"attention by {kind.__name__} cannot {what}",
                where=f"train_module.{option}",
                why="only attention.name: grouped_query knows how",
                fix=f"leave {option} out, or use that",
            )
    experts = model.config.feed_forward
    if isinstance(experts, MixtureConfig) and isinstance(experts.balance, DocumentBalance):
        raise UsageError(
            "the balance sequence_aux needs whole documents on each rank",
            where="model.feed_forward.balance",
            why=f"with {option} a document may lie on {degree} of them",
            fix=f"use bias or global_aux, or leave {option} out",
        )


def require_same_rows(digest: str, world: World) -> None:
    """Compare what the ranks that share micro-batches got; every rank of the run calls it.

    Args:
        digest: of this rank's micro-batches.

    Raises:
        ValidationError: they differ, on any ranks; the same error on every rank.
    """
    first = dict[int, tuple[int, str]]()
    for rank, (reader, found) in enumerate(world.gather((world.reader, digest))):
        other, expected = first.setdefault(reader, (rank, found))
        if found != expected:
            raise ValidationError(
                f"ranks {other} and {rank} share micro-batches, and were given different rows",
                where="data_loader",
                why="each would compute its part of another text",
                fix="give the loader the reader of train_module.world for a rank, and its "
                "readers for their number",
            )
