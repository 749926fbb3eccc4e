"""The plan: grouping, digests, differences. Pure, so tested by properties."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from olm_data.dataset.plan import (
    group,
    likely_text,
    make_plan,
    shard_name,
    shard_text,
)

SIZES = st.lists(st.integers(0, 1000), max_size=60)


def plan_of(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "settings": {"eos": 0, "text_column": "text"},
        "inputs": [
            {"path": "a.jsonl", "bytes": 10, "revision": "1", "url": "/x/a.jsonl"},
            {"path": "b.jsonl", "bytes": 20, "revision": "1", "url": "/x/b.jsonl"},
        ],
        "units": [[0, 0, 10, 10], [1, 0, 10, 10], [1, 10, 20, 10]],
        "target": 20,
    }
    return make_plan(**{**values, **changes})


@given(SIZES, st.integers(1, 3000))
def test_tasks_tile_the_units_in_order_and_none_is_empty(sizes: list[int], target: int) -> None:
    tasks = group(sizes, target)
    assert [i for start, stop in tasks for i in range(start, stop)] == list(range(len(sizes)))
    assert all(stop > start for start, stop in tasks)


@given(SIZES, st.integers(1, 3000))
def test_a_task_is_within_the_target_or_a_single_unit(sizes: list[int], target: int) -> None:
    for start, stop in group(sizes, target):
        assert sum(sizes[start:stop]) <= target or stop - start == 1


@given(SIZES, st.integers(1, 3000))
def test_no_two_neighbouring_tasks_would_fit_into_one_at_their_border(
    sizes: list[int], target: int
) -> None:
    tasks = group(sizes, target)
    for (start, stop), _ in pairwise(tasks):
        assert sum(sizes[start : stop + 1]) > target


def test_sums_beyond_32_bits_are_exact() -> None:
    assert group([2**40, 2**40, 2**40], 2**41) == ((0, 2), (2, 3))


def test_the_shard_size_follows_the_users_wish_or_the_size_of_the_inputs() -> None:
    assert shard_text(10**12, 1000) == 4000
    assert shard_text(10**12, None) == 400_000_000
    assert shard_text(0, None) == 400_000_000
    assert shard_text(10**6, None) == 4 << 20
    assert shard_text(64 * 10**7, None) == 10**7


def test_compressed_inputs_are_expected_to_hold_more_text_than_bytes() -> None:
    assert likely_text([("a.jsonl.gz", 10), ("b.jsonl", 10), ("c.parquet", 10)]) == 60


def test_the_digest_depends_on_inputs_settings_and_cuts_and_on_nothing_else() -> None:
    base = plan_of()
    inputs = [dict(item) for item in base.inputs]
    assert plan_of(inputs=[{**item, "revision": "2", "url": "/y"} for item in inputs]).digest == (
        base.digest
    )
    others = [
        plan_of(settings={"eos": None, "text_column": "text"}),
        plan_of(settings={"eos": 0, "text_column": "content"}),
        plan_of(inputs=[{**inputs[0], "bytes": 11}, inputs[1]]),
        plan_of(inputs=[{**inputs[0], "path": "c.jsonl"}, inputs[1]]),
        plan_of(target=10),
        plan_of(units=[[0, 0, 10, 10], [1, 0, 20, 20]]),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 1 + len(others)


def test_a_stored_plan_differs_in_nothing_from_itself() -> None:
    assert plan_of().differences(plan_of().to_json()) == []


def test_differences_name_the_option_the_input_and_both_values() -> None:
    stored = plan_of().to_json()
    now = plan_of(
        settings={"eos": 5, "text_column": "text"},
        inputs=[
            {"path": "a.jsonl", "bytes": 10, "revision": "2"},
            {"path": "c.jsonl", "bytes": 20, "revision": "1"},
        ],
    )
    found = now.differences(stored)
    assert "eos: 0 there, 5 now" in found
    assert "input a.jsonl: changed since (revision 1 there)" in found
    assert "input c.jsonl: new" in found
    assert "input b.jsonl: gone" in found


def test_tasks_know_their_inputs_and_sizes() -> None:
    plan = plan_of()
    assert plan.tasks == ((0, 2), (2, 3))
    assert [plan.text_bytes(task) for task in (0, 1)] == [20, 10]
    assert [plan.inputs_of(task) for task in (0, 1)] == [[0, 1], [1]]
    assert plan.describe(0) == "a.jsonl to b.jsonl (2 files)"
    assert plan.describe(1) == "b.jsonl"
    assert [shard_name(0), shard_name(123456)] == ["shard-00000", "shard-123456"]
