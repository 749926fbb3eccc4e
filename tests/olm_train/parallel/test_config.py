"""The options of data parallelism: degrees that cover the world, nothing without effect."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.training import build

from olm_data.config.convert import parse
from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_train.parallel.config import (
    ContextParallelConfig,
    DataParallelConfig,
    DataParallelType,
    TensorParallelConfig,
)
from olm_train.parallel.mesh import Mesh, divisors

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
