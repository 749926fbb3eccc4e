"""Which rank does what: degrees checked, and added up for every way to factor up to 64 ranks."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training import build
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from olm_data.config.convert import parse
from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_train.distributed.world import World
from olm_train.parallel.config import (
    ContextParallelConfig,
    DataParallelConfig,
    DataParallelType,
    TensorParallelConfig,
)
from olm_train.parallel.mesh import (
    COUNTS,
    CUT,
    EXPERT,
    EXPERTS,
    WEIGHTS,
    WHOLE,
    Axes,
    Axis,
    Held,
    Mesh,
    divisors,
)

MOST = 64
KINDS = {"cut": CUT, "whole": WHOLE, "expert": EXPERT}


def factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many factors, in order."""
    if parts == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in factorisations(number // first, parts - 1):
            yield (first, *rest)


def meshes(ranks: int) -> Iterator[Mesh]:
    """Every mesh of so many ranks; those that differ in ep alone differ in their experts alone."""
    for degrees in factorisations(ranks, len(WEIGHTS)):
        yield Mesh(**dict(zip(WEIGHTS, degrees, strict=True)))
    for pp, replicate, shard, ep in factorisations(ranks, len(EXPERTS)):
        if ep > 1:
            borrowed = math.gcd(ep, 4)  # of tp as well
            yield Mesh(
                pp=pp, dp_replicate=replicate, dp_shard=shard * ep // borrowed, tp=borrowed, ep=ep
            )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param([*range(1, 13), 16, 24], id="some"),
        pytest.param(range(1, MOST + 1), id="all", marks=pytest.mark.slow),
    ],
)
def every(request: pytest.FixtureRequest) -> list[Mesh]:
    return [mesh for ranks in request.param for mesh in meshes(ranks)]


@cache
def coordinates(mesh: Mesh) -> list[dict[Axis, int]]:
    return [mesh.coordinates(rank) for rank in range(mesh.size)]


@cache
def places(mesh: Mesh) -> list[World]:
    return [
        World(rank=rank, size=mesh.size, sharers=mesh.cp * mesh.tp, stages=mesh.pp)
        for rank in range(mesh.size)
    ]


def at(mesh: Mesh, axes: Axes) -> list[tuple[int, ...]]:
    """The coordinates of each rank along some axes."""
    return [tuple(place[axis] for axis in axes) for place in coordinates(mesh)]


def points(mesh: Mesh, axes: Axes) -> list[tuple[int, ...]]:
    """All coordinates there are along some axes, ascending."""
    return [*itertools.product(*(range(mesh.degree(axis)) for axis in axes))]


def partition(mesh: Mesh, axes: Axes) -> list[tuple[int, ...]]:
    """The groups along some axes; where there are none, each rank alone."""
    return [*mesh.groups(*axes)] or [(rank,) for rank in range(mesh.size)]


def summed(group: Sequence[int], given: Sequence[Sequence[Hashable]]) -> Counter[Hashable]:
    """What a sum over a group meets, and how often, where each rank gives these parts."""
    return Counter(itertools.chain.from_iterable(given[rank] for rank in group))


def once(parts: Sequence[Hashable]) -> Counter[Hashable]:
    return Counter(dict.fromkeys(parts, 1))


def test_coordinates_number_the_ranks_one_to_one_in_both_views(every: list[Mesh]) -> None:
    for mesh in every:
        assert at(mesh, WEIGHTS) == points(mesh, WEIGHTS), mesh
        assert at(mesh, EXPERTS) == points(mesh, EXPERTS), mesh


def test_groups_of_axes_partition_the_ranks_by_the_other_axes(every: list[Mesh]) -> None:
    for mesh in every:
        for view in (WEIGHTS, EXPERTS):
            for axes in [*((axis,) for axis in view), COUNTS]:
                if not {*axes} <= {*view}:
                    continue
                groups = mesh.groups(*axes)
                if mesh.degree(*axes) == 1:
                    assert groups == ()
                    continue
                assert sorted(itertools.chain(*groups)) == [*range(mesh.size)]
                assert {len(group) for group in groups} == {mesh.degree(*axes)}
                along = at(mesh, axes)
                others = at(mesh, tuple(axis for axis in view if axis not in axes))
                for group in groups:
                    assert len({others[rank] for rank in group}) == 1
                    assert [along[rank] for rank in group] == points(mesh, axes)


@given(st.sampled_from([*factorisations(48, 5), *factorisations(64, 5)]), st.data())
def test_a_group_is_that_of_each_of_its_ranks(
    degrees: tuple[int, ...], data: st.DataObject
) -> None:
    mesh = Mesh(**dict(zip(WEIGHTS, degrees, strict=True)))
    ep = data.draw(st.sampled_from(divisors(mesh.degree("dp_shard", "cp", "tp"))))
    mesh = replace(mesh, ep=ep)
    view = data.draw(st.sampled_from([WEIGHTS, EXPERTS]))
    axes = tuple(data.draw(st.sets(st.sampled_from(view), min_size=1)))  # in any order
    for group in partition(mesh, axes):
        assert {mesh.group(rank, *axes) for rank in group} == {group}


def test_each_row_is_read_by_the_ranks_that_share_its_tokens_and_no_other(
    every: list[Mesh],
) -> None:
    for mesh in every:
        readers = mesh.dp_replicate * mesh.dp_shard
        assert {place.readers for place in places(mesh)} == {readers} == {mesh.readers}
        by_reader: dict[int, list[int]] = {reader: [] for reader in range(readers)}
        for rank, place in enumerate(places(mesh)):
            by_reader[place.reader].append(rank)
        same_tokens = [[*group] for group in partition(mesh, ("pp", "cp", "tp"))]
        assert sorted(by_reader.values()) == sorted(same_tokens)


def test_counts_meet_each_token_once(every: list[Mesh]) -> None:
    """Each reader has one row, of one token for each rank of cp and tp."""
    for mesh in every:
        tokens = [
            [(place.reader, where["cp"], where["tp"])]
            for place, where in zip(places(mesh), coordinates(mesh), strict=True)
        ]
        parts = (range(places(mesh)[0].readers), range(mesh.cp), range(mesh.tp))
        whole = once([*itertools.product(*parts)])
        for group in partition(mesh, COUNTS):
            assert summed(group, tokens) == whole, mesh


def tokens_of(mesh: Mesh, kind: str) -> list[list[Hashable]]:
    """The tokens that each rank's parameters of a kind compute with.

    A row is one token for each rank of cp and tp. A product that tp cuts sees those of all ranks of
    tp; what stands between sees its own; an expert those that the ranks of its ep group send.
    """
    own = at(mesh, ("dp_replicate", "dp_shard", "cp", "tp"))
    tokens: list[list[Hashable]] = [[] for _ in own]
    along: Axes = {"cut": ("tp",), "whole": (), "expert": ("ep",)}[kind]  # type: ignore[assignment]
    for group in partition(mesh, along):
        for rank in group:
            tokens[rank] = [own[other] for other in group]
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_a_parameter_meets_each_token_once(every: list[Mesh], kind: str) -> None:
    held = KINDS[kind]
    for mesh in every:
        tokens = tokens_of(mesh, kind)
        whole = once(points(mesh, ("dp_replicate", "dp_shard", "cp", "tp")))
        parameter = at(mesh, held.parted)
        groups = partition(mesh, held.gradients)
        for group in groups:
            assert summed(group, tokens) == whole, mesh
        assert [parameter[group[0]] for group in groups] == points(mesh, held.parted)
        assert all(len({parameter[rank] for rank in group}) == 1 for group in groups)


def shards(mesh: Mesh, held: Held) -> list[tuple[int, ...]]:
    """Which shard of which parameters each rank holds."""
    return at(mesh, held.parted + held.sharded)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_shard_are_one_group_and_one_of_them_writes_it(
    every: list[Mesh], kind: str
) -> None:
    held = KINDS[kind]
    for mesh in every:
        holders: dict[tuple[int, ...], tuple[int, ...]] = {}
        for rank, shard in enumerate(shards(mesh, held)):
            holders[shard] = (*holders.get(shard, ()), rank)
        copies = partition(mesh, held.copies)
        assert sorted(holders.values()) == sorted(copies), mesh
        items = [_item(number) for number in range(len(copies))]
        plans = [
            SavePlan([item for item, group in zip(items, copies, strict=True) if rank in group])
            for rank in range(mesh.size)
        ]
        written = [
            (int(item.index.fqn), rank)
            for rank, plan in enumerate(dedup_save_plans(plans))
            for item in plan.items
        ]
        assert sorted(number for number, _ in written) == [*range(len(copies))], mesh
        assert all(rank in copies[number] for number, rank in written), mesh


def _item(number: int) -> WriteItem:
    """Return part `number` of a checkpoint, as torch's plans of what to save have it."""
    shape = torch.Size([8])
    return WriteItem(
        MetadataIndex(str(number), torch.Size([0])),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(torch.Size([0]), shape),
            TensorProperties(dtype=torch.uint8),
            shape,
        ),
    )


def test_eight_ranks_by_hand() -> None:
    mesh = Mesh(dp_shard=2, cp=2, tp=2, ep=4)
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("cp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("dp_shard") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("edp_shard") == mesh.groups("dp_shard")
    assert mesh.groups("dp_replicate") == mesh.groups("pp") == ()
    assert mesh.groups("dp_shard", "cp") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert mesh.groups(*COUNTS) == (tuple(range(8)),)
    assert [world.reader for world in places(mesh)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert mesh.readers == 2


@pytest.mark.parametrize(
    "alone", [Mesh(), Mesh.over(1), Mesh.over(1, dp_replicate=None, dp_shard=1)]
)
def test_one_rank_has_no_group_and_sums_with_itself(alone: Mesh) -> None:
    assert alone.size == 1
    assert not any(alone.groups(axis) for axis in WEIGHTS + EXPERTS)
    assert alone.group(0, *COUNTS) == (0,)


@given(st.integers(1, MOST), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_degree_that_is_not_said_is_what_the_others_leave(
    dp: int, cp: int, tp: int, pp: int, data: st.DataObject
) -> None:
    replicate = data.draw(st.sampled_from(divisors(dp)))
    ep = data.draw(st.sampled_from(divisors(dp // replicate * cp * tp)))
    said = {"cp": cp, "tp": tp, "pp": pp, "ep": ep}
    whole = Mesh(dp_replicate=replicate, dp_shard=dp // replicate, **said)
    for known in (
        {"dp_replicate": replicate},
        {"dp_replicate": None, "dp_shard": dp // replicate},
        {"dp_replicate": replicate, "dp_shard": dp // replicate},
    ):
        assert Mesh.over(dp * cp * tp * pp, **known, **said) == whole


@given(st.integers(1, 512), st.integers(-2, 600), st.sampled_from(["tp", "cp", "pp", "dp_shard"]))
def test_a_degree_is_taken_or_the_nearest_that_fit_are_named(
    ranks: int, degree: int, axis: str
) -> None:
    others = {"dp_replicate": None} if axis == "dp_shard" else {}
    degrees = {**others, axis: degree}
    if degree in divisors(ranks):
        assert getattr(Mesh.over(ranks, **degrees), axis) == degree
        return
    with pytest.raises(UsageError) as refusal:
        Mesh.over(ranks, **degrees)
    below = [n for n in divisors(ranks) if n < degree][-1:]
    above = [n for n in divisors(ranks) if n > degree][:1]
    near = " or ".join(map(str, below + above))
    assert str(refusal.value.fix).startswith(f"set it to {near}: ")
    assert f"{axis} {degree} does not divide the {ranks:,} rank" in refusal.value.what
    assert refusal.value.where == axis
    assert refusal.value.why


@pytest.mark.parametrize(
    ("ranks", "degrees", "said", "fix"),
    [
        (8, {"tp": 4, "cp": 3}, "cp 3 does not divide the 2 ranks that tp 4 leaves", "2"),
        (
            64,
            {"pp": 2, "tp": 8, "dp_replicate": 3},
            "dp_replicate 3 does not divide the 4 ranks that pp 2 x tp 8 leaves",
            "2 or 4: it is one of 1, 2, 4",
        ),
        (8, {"tp": 2, "dp_shard": 2}, "tp 2 x dp_shard 2 make 4 ranks, and there are 8", "to 4"),
        (
            8,
            {"tp": 2, "cp": 2, "ep": 3},
            "ep 3 does not divide the 8 ranks that it borrows from dp_shard 2 x cp 2 x tp 2",
            "2 or 4",
        ),
        (
            8,
            {"dp_replicate": None, "dp_shard": 1, "ep": 2},
            "ep 2 does not divide the 1 rank that it borrows from dp_shard, cp and tp",
            "1",
        ),
    ],
)
def test_degrees_that_do_not_fit_together_are_refused(
    ranks: int, degrees: dict[str, int | None], said: str, fix: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        Mesh.over(ranks, **degrees)  # type: ignore[arg-type]
    assert said in refusal.value.what
    assert fix in str(refusal.value.fix)


FSDP, HSDP, DDP = (getattr(DataParallelType, name) for name in ("fsdp", "hsdp", "ddp"))


@given(st.integers(1, 64), st.integers(1, 16), st.data())
def test_replicas_times_shards_is_the_world(per_node: int, nodes: int, data: st.DataObject) -> None:
    world = per_node * nodes
    assert DataParallelConfig(name=DDP).mesh(world, nodes) == Mesh(dp_replicate=world)
    assert DataParallelConfig(name=FSDP).mesh(world, nodes) == Mesh(dp_shard=world)
    machines = Mesh(dp_replicate=nodes, dp_shard=per_node)
    assert DataParallelConfig(name=HSDP).mesh(world, nodes) == machines
    one = data.draw(st.sampled_from(divisors(world)))
    other = world // one
    for options in (
        {"num_replicas": one},
        {"shard_degree": other},
        {"num_replicas": one, "shard_degree": other},
    ):
        mesh = DataParallelConfig(name=HSDP, **options).mesh(world, nodes)
        assert mesh == Mesh(dp_replicate=one, dp_shard=other)


@given(st.integers(1, 300))
def test_divisors_are_all_of_them_ascending(number: int) -> None:
    assert divisors(number) == sorted({d for d in range(1, number + 1) if number % d == 0})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": DDP, "reduce_dtype": "bfloat16"}, "has no effect with name: ddp"),
        ({"name": DDP, "cpu_offload": True}, "has no effect with name: ddp"),
        ({"name": DDP, "reshard_after_forward": False}, "has no effect with name: ddp"),
        ({"name": DDP, "prefetch_factor": 1}, "has no effect with name: ddp"),
        ({"name": FSDP, "num_replicas": 2}, "has no effect without name: hsdp"),
        ({"name": FSDP, "shard_degree": 2}, "has no effect without name: hsdp"),
        ({"name": HSDP, "num_replicas": 0}, "at least 1"),
        ({"name": FSDP, "prefetch_factor": -1}, "at least 0"),
        ({"name": FSDP, "reshard_after_forward": 1}, "an integer (at least 2), not 1"),
    ],
    ids=str,
)
def test_options_that_do_nothing_or_cannot_be_are_refused(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        DataParallelConfig(**options)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("axis", "degree", "ranks", "said"),
    [
        *((axis, 3, 4, "degree 3 does not divide the 4 ranks") for axis in ("tp", "cp", "ep")),
        *((axis, 2, 1, "degree 2 does not divide the 1 rank") for axis in ("cp", "ep")),
        ("pp", 2, 3, "degree 2 does not divide the 3 ranks"),
    ],
)
def test_degrees_that_do_not_divide_the_ranks_are_refused_with_those_that_do(
    axis: str, degree: int, ranks: int, said: str
) -> None:
    with pytest.raises(UsageError, match=said) as refusal:
        DataParallelConfig().mesh(ranks, **{axis: degree})
    assert refusal.value.where == f"train_module.{axis}_config.degree"
    assert degree != 3 or "2 or 4" in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "axis", "degree", "said"),
    [
        ({"name": HSDP, "num_replicas": 2}, "ep", 4, "degree 4 does not divide the 2 ranks"),
        *(({"name": DDP}, axis, 2, "set it to fsdp or hsdp") for axis in ("tp", "ep")),
        ({"name": HSDP, "num_replicas": 3}, "tp", 1, "(?s)num_replicas 3 .* 4 ranks.*1, 2, 4"),
        (
            {"name": HSDP, "num_replicas": 4, "shard_degree": 4}, "tp", 1,
            "shard_degree 4 does not divide the 1 rank that num_replicas 4 leaves",
        ),
        ({"reshard_after_forward": 3}, "tp", 1, "forward 3 does not divide the 4 ranks"),
        *(({"reshard_after_forward": 2}, axis, 2, "true or false") for axis in ("tp", "ep")),
    ],
)  # fmt: skip
def test_ways_to_share_that_four_ranks_cannot_have_are_refused(
    options: dict[str, Any], axis: str, degree: int, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        DataParallelConfig(**options).mesh(4, **{axis: degree})


@pytest.mark.parametrize("kind", [ContextParallelConfig, TensorParallelConfig])
def test_tokens_that_ranks_cannot_have_in_equal_parts_are_refused(kind: Any) -> None:
    axis = {ContextParallelConfig: "cp", TensorParallelConfig: "tp"}[kind]
    with pytest.raises(UsageError, match=r"3 ranks cannot have as many tokens each") as refusal:
        build(rank_microbatch_size=32, **{f"{axis}_config": kind(degree=3)})
    assert refusal.value.where == f"train_module.{axis}_config.degree"
    assert "30 or 33" in str(refusal.value)


@pytest.mark.parametrize("value", [True, False, 4])
def test_the_reshard_policy_is_true_false_or_a_number_in_yaml(value: bool | int) -> None:
    config = parse(DataParallelConfig, Values({"reshard_after_forward": value}))
    assert config.reshard_after_forward is value


def test_offload_is_refused_on_one_rank_where_nothing_is_wrapped() -> None:
    with pytest.raises(UsageError) as refusal:
        build("fsdp", sharing={"cpu_offload": True})
    assert "no effect on one rank" in str(refusal.value)
    assert "at least two ranks" in str(refusal.value)
