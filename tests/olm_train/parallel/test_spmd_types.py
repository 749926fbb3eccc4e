"""A second judge of what is summed over ranks: spmd_types, which types tensors along axes of ranks.

    parallelize     -> ranks over which FSDP2 sums a gradient -> the type of its parameter:
                       R summed, V of the rank's own part, I alike on all ranks and not summed
    our exchanges   -> collectives that they call, forward and backward -> what they make of a type
    typed decoder   -> types of all it computes -> a loss that is to be summed, or alike on all

All runs in one process on a fake process group: values mean nothing, types are what is checked. Not
seen: what FSDP2 and DDP do in their hooks, and torch's pipeline, which call no function of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.batches import make_batch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._api import _ToTorchTensor

from olm_train.data.batch import Batch
from olm_train.data.dealing import ContextShare, Dealing, SequenceSlice
from olm_train.distributed.world import World
from olm_train.model import loss as losses
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder, build_decoder
from olm_train.model.loss_chunked import _Chunked
from olm_train.model.loss_config import LossConfig
from olm_train.model.norm import _RMSNorm
from olm_train.model.rope import _Rotation
from olm_train.model.shards import TENSOR
from olm_train.parallel import apply, tensor
from olm_train.parallel.config import ContextParallelConfig, DataParallelConfig
from olm_train.parallel.context import ContextParallel, Exchange
from olm_train.parallel.exchange import _BothWays, both_ways, device_mesh
from olm_train.parallel.mesh import Axis, Mesh
from olm_train.parallel.tensor import Ranks, TensorParallel

spmd = pytest.importorskip("spmd_types")
from spmd_types import I, P, R, V, rules  # noqa: E402
from spmd_types._raw_dist import RAW_DIST_RULES  # noqa: E402
from spmd_types._state import _current_mode  # noqa: E402
from spmd_types._testing import fake_pg  # noqa: E402
from spmd_types.checker import typecheck  # noqa: E402

MODEL = DecoderConfig(
    vocab_size=96,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    feed_forward={"hidden_size": 48},
    attention={"qk_norm": "head", "backend": "sdpa"},
)
AXES: tuple[Axis, ...] = ("dp_shard", "cp", "tp")
REAL = {
    name: getattr(dist, name)
    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce", "all_to_all_single")
}
MADE = {  # by collectives forward and backward: what they take, and what they make of it
    ("all_gather_single", "reduce_scatter_single"): ((V,), R),
    ("all_gather_single", ""): ((V,), I),
    ("reduce_scatter_single", "all_gather_single"): ((V, P), V),
    ("all_reduce", "all_reduce"): ((V, P), R),
    ("all_reduce", ""): ((V, P), I),
    ("all_to_all_single", "all_to_all_single"): ((V,), V),
}


class Context(SimpleNamespace):
    """Keeps what a function of autograd gives its context."""

    def save_for_backward(self, *kept: Tensor) -> None:
        self.saved_tensors = kept

    def mark_non_differentiable(self, *_: Tensor) -> None: ...


@contextmanager
def heard() -> Iterator[list[tuple[str, Any]]]:
    """Names and groups of the collectives that are called within; a maximum sums nothing."""
    calls: list[tuple[str, Any]] = []

    def hear(name: str, *args: Any, **options: Any) -> Any:
        if options.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM:
            calls.append((name, options["group"]))
        return REAL[name](*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        for name in REAL:
            patch.setattr(dist, name, partial(hear, name))
        yield calls


def exchanged(function: Any, x: Tensor, args: tuple[Any, ...]) -> Any:
    """What a function of ours makes of the type of `x`, by what its own code exchanges."""
    context = Context()
    plain = [each.detach().clone() if isinstance(each, Tensor) else each for each in args]
    with heard() as forward:
        out = function.forward(context, *plain)
    with heard() as backward:
        function.backward(context, torch.ones_like(out[0] if isinstance(out, tuple) else out))
    if function is tensor._ByRows:  # gathers its tokens again
        backward = [call for call in backward if call not in forward]
    calls = tuple("+".join(name for name, _ in each) for each in (forward, backward))
    group = next((group for _, group in forward + backward), None)
    taken, made = MADE.get(calls, ((), V))
    found = None if group is None else spmd.get_axis_local_type(x, group)
    if found not in taken:
        raise spmd.SpmdTypeError(f"{function.__name__}: {calls} of {found}")
    typed = rules.NdimWithSpmdType(x.ndim)
    spmd.assert_type(typed, {**spmd.get_local_type(x), spmd.normalize_axis(group): made})
    return typed


def of_exchange(out: Tensor, *, x: Tensor, there: Any, back: Any) -> None:
    rules.ignore(x)
    spmd.assert_type(out, spmd.get_local_type(exchanged(_BothWays, x, (x, there, back))))


def of_rows(*, x: Tensor, weight: Tensor, bias: Any, ranks: Any, products: Any) -> Any:
    rules.ignore(x)
    every = exchanged(tensor._ByRows, x, (x, weight, bias, ranks, products))
    return rules.einsum("...k,nk->...n", every, weight)


def of_part(
    out: Any, *, logits: Any, labels: Any, weights: Any, z_multiplier: Any, ranks: Any, first: Any
) -> None:
    rules.ignore(logits, labels)
    args = (logits, labels, weights, z_multiplier, ranks, first)
    found = spmd.get_local_type(exchanged(tensor._CrossEntropy, logits, args))
    for each in out:
        spmd.assert_type(each, found)


def of_chunks(
    out: Any, *, x: Any, weight: Any, labels: Any, weights: Any, head: Any, sums: Any
) -> None:
    """The loss, once more and at once."""
    rules.ignore(x, weight, labels)
    with _current_mode():
        again = sums(head.of_products(x.flatten(0, -2) @ weight.t()), labels.flatten(), weights)
    for each, typed in zip(out, again, strict=True):
        if each is not None:
            spmd.assert_type(each, spmd.get_local_type(typed))


def gathers(func: Any, args: Any, options: Any) -> None:
    """`all_gather_single` of what needs no gradient, into memory that says nothing yet."""
    out, given = args
    axis = spmd.normalize_axis(options["group"])
    assert spmd.get_axis_local_type(given, axis) is V
    spmd.runtime._set_local_type(out, {**spmd.get_local_type(given), axis: R})


@pytest.fixture(autouse=True)
def _rules(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = {_BothWays: of_exchange, tensor._ByRows: of_rows, tensor._CrossEntropy: of_part}
    for function, hook in {**hooks, _Chunked: of_chunks}.items():
        monkeypatch.setattr(function, "spmd_typecheck", staticmethod(hook), raising=False)
    monkeypatch.setitem(RAW_DIST_RULES, dist.all_gather_single, gathers)
    for function in (_RMSNorm, _Rotation, losses._CrossEntropy, tensor._ByColumns):
        spmd.register_local_autograd_function(function)


def summed_over(parameter: Any, mesh: Mesh) -> dict[str, Any]:
    """The type along each axis that what FSDP2 does with the gradient makes right."""
    names, ranks = parameter.device_mesh.mesh_dim_names, parameter.device_mesh.mesh
    cut = TENSOR in names
    ranks = ranks[..., 0] if cut else ranks  # of rank 0, the first along each axis
    places = [mesh.coordinates(rank) for rank in ranks.flatten().tolist()]
    apart = {axis for axis in AXES if len({place[axis] for place in places}) > 1}
    return {a: R if a in apart else V if cut and a == "tp" else I for a in AXES}


def judge(mesh: Mesh, exchange: str = "gather") -> None:
    """Type one forward and backward pass of rank 0.

    Raises:
        SpmdTypeError: a gradient would not be the sum that it has to be.
    """
    with fake_pg(mesh.size):
        world = World(rank=0, size=mesh.size, sharers=mesh.cp * mesh.tp)
        choice = LossConfig().choose(MODEL, microbatch=64, compiling=False)
        made: list[tuple[Decoder, TensorParallel | None]] = []
        for _ in range(2):
            model = build_decoder(MODEL, device="meta", dtype=torch.float32)
            cut = TensorParallel(model, choice, mesh, world) if mesh.tp > 1 else None
            made.append((model, cut))
        (spread, cut), (model, parts) = made
        apply.parallelize(
            spread, DataParallelConfig(param_dtype="float32"), world, mesh=mesh, tensor=cut
        )
        types = {name: summed_over(p, mesh) for name, p in spread.named_parameters()}
        model.to_empty(device="cpu")
        batch: Batch = make_batch([[32], [16, 16]], vocab_size=96)
        loss: Callable[..., Any] = choice.build()
        here: dict[str, Any] = dict.fromkeys(AXES, R) | {"dp_shard": V}
        if mesh.cp > 1:
            context = ContextParallel(
                ContextParallelConfig(degree=mesh.cp, exchange=exchange), model, mesh, world
            )
            dealt = Dealing(mesh.cp, MODEL.windows)(batch)
            batch = ContextShare.take(dealt, context.rank, context.contexts)
        shared = batch
        if parts is not None:
            batch, loss = SequenceSlice.take(batch, 0, mesh.tp), parts.loss
        axes = init_device_mesh("cpu", tuple(map(mesh.degree, AXES)), mesh_dim_names=AXES)
        with spmd.set_current_mesh(axes), typecheck(), pytest.MonkeyPatch.context() as patch:
            typed: dict[int, Any] = {}
            for name, parameter in model.named_parameters():
                typed[id(parameter)] = types[name]
                if not isinstance(parameter, DTensor):
                    spmd.assert_type(parameter, types[name])

            def to_local(given: Any, *args: Any) -> Tensor:
                out: Tensor = _ToTorchTensor.apply(given, *args)
                return spmd.assert_type(out, typed[id(given)])

            patch.setattr(_ToTorchTensor, "typecheck_forward", staticmethod(to_local))
            own = here | {"cp": V} if mesh.cp > 1 else here
            annotate(getattr(shared, "whole", shared), here)
            annotate(shared, own)
            annotate(batch, own | {"tp": V})
            sums = batch.through(model, partial(loss, labels=batch.labels))
            total = sums.total
            for axis in ("dp_shard", "cp"):
                if mesh.degree(axis) > 1:
                    total = spmd.reinterpret(total, axis, src=V, dst=P)
            total.backward()


def annotate(batch: Batch, types: dict[str, Any]) -> None:
    for name in ("input_ids", "labels", "cu_seqlens", "rows", "dealt", "places"):
        value = getattr(batch, name, None)
        if isinstance(value, Tensor) and not spmd.has_local_type(value):
            spmd.assert_type(value, types)


@pytest.mark.parametrize(
    ("mesh", "exchange"),
    [
        (Mesh(dp_shard=2), "gather"),
        (Mesh(cp=2), "gather"),
        (Mesh(cp=2), "ulysses"),
        (Mesh(tp=2), "gather"),
        (Mesh(dp_shard=2, cp=2, tp=2), "gather"),
    ],
    ids=str,
)
def test_gradients_are_sums(mesh: Mesh, exchange: str) -> None:
    judge(mesh, exchange)


@pytest.mark.parametrize("left", AXES)
def test_a_parameter_that_is_not_summed_over_an_axis(
    left: Axis, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(dp_shard=2, cp=2, tp=2)

    def without(mesh: Mesh, world: World) -> Any:
        """The ranks of all axes but one: along it FSDP2 knows nothing of the others."""
        axes = {axis: mesh.degree(axis) for axis in AXES}
        ranks = device_mesh(mesh, world, axes)
        return ranks[tuple(axis for axis in AXES if axis != left)]._flatten("dp_shard_rest")

    monkeypatch.setattr(apply, "_device_mesh", without)
    with pytest.raises(spmd.SpmdTypeError, match=r"Invariant|Incompatible"):
        judge(mesh)


def own_part(ranks: Ranks, x: Tensor, dim: int) -> Tensor:
    return x.chunk(ranks.degree, dim)[ranks.rank]


def rows_alone(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    tokens = ctx.ranks.collect(x)()
    weight_grad = grad.flatten(0, -2).t() @ tokens.flatten(0, -2)
    return own_part(ctx.ranks, grad @ weight, 1), weight_grad, None, None, None


def summed_again(ctx: Any, *upstream: Tensor) -> Any:
    grad, *rest = BACKWARD(ctx, *upstream)
    dist.all_reduce(grad, group=dist.group.WORLD)
    return grad, *rest


BACKWARD = tensor._CrossEntropy.backward
MUTANTS: dict[str, tuple[str, Mesh, Any, str, Any]] = {
    "context: no sum of gradients": (
        r"Invariant type",
        Mesh(cp=2),
        Exchange,
        "sum_up",
        lambda self, x: x.index_select(0, self.own),
    ),
    "context: heads that do not come back": (
        r"'all_to_all_single', ''\)",
        Mesh(cp=2),
        Exchange,
        "own_tokens",
        lambda self, x: both_ways(x.flatten(0, 1), self.to_tokens, lambda g: g.flatten(0, 1)),
    ),
    "tensor: no sum of the head's gradients": (
        r"Invariant type",
        Mesh(tp=2),
        Ranks,
        "gather",
        lambda self, x, dim=1: both_ways(
            x, lambda x: self.collect(x, dim)(), lambda g: own_part(self, g, dim)
        ),
    ),
    "tensor: no sum of a product's gradients": (
        r"Invariant type",
        Mesh(tp=2),
        tensor._ByRows,
        "backward",
        staticmethod(rows_alone),
    ),
    "tensor: no sum of parts of a product": (
        r"\('', 'all_gather_single'\)",
        Mesh(tp=2),
        Ranks,
        "scatter",
        lambda self, x: both_ways(x, lambda x: own_part(self, x, 1), lambda g: self.collect(g)()),
    ),
    "tensor: a sum of sums": (
        r"of \S*\bR\b",
        Mesh(tp=2),
        Ranks,
        "scatter",
        lambda self, x: both_ways(
            self.total(x), lambda x: self.sum_up(x)(), lambda g: self.collect(g)()
        ),
    ),
    "tensor: no sum of the parts of a loss": (
        r"\('', ''\)",
        Mesh(tp=2),
        Ranks,
        "add",
        lambda self, x, op=None: x.clone(),
    ),
    "tensor: gradients of the loss summed twice": (
        r"Replicate loss",
        Mesh(tp=2),
        tensor._CrossEntropy,
        "backward",
        staticmethod(summed_again),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_an_exchange_without_its_sum_or_with_two(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    why, mesh, owner, what, instead = MUTANTS[name]
    monkeypatch.setattr(owner, what, instead)
    with pytest.raises(spmd.SpmdTypeError, match=why):
        judge(mesh, "ulysses" if "heads" in name else "gather")
