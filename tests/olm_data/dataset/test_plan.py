"""The plan: grouping, digests, differences. Pure, so tested by properties."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import plans

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.options import Last
from olm_data.dataset.plan import OtherVersion, Plan, group, likely_text, shard_name, shard_text
from olm_data.errors import ValidationError
from olm_data.storage.store import Store

SIZES = st.lists(st.integers(0, 1000), max_size=60)


INPUTS = [("a.jsonl", 10, "1"), ("b.jsonl", 20, "1")]
UNITS = [(0, 0, 10, 10), (1, 0, 10, 10), (1, 10, 20, 10)]


def plan_of(inputs: Any = INPUTS, units: Any = UNITS, target: int = 20, **settings: Any) -> Plan:
    return plans.plan_of(inputs, units, target, **settings)


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
    assert plan_of([(path, size, "2") for path, size, _ in INPUTS]).digest == base.digest
    others = [
        plan_of(eos=None),
        plan_of(text_column="content"),
        plan_of([("a.jsonl", 11, "1"), INPUTS[1]]),
        plan_of([("c.jsonl", 10, "1"), INPUTS[1]]),
        plan_of(target=10),
        plan_of(units=[(0, 0, 10, 10), (1, 0, 20, 20)]),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 1 + len(others)


def test_a_stored_plan_is_the_plan() -> None:
    plan = plan_of(where="n > 3", sample="1/3", last=Last("a.jsonl", 5, 40), limit=2)
    assert Plan.decode(plan.encode()) == plan
    assert plan.differences(Plan.decode(plan.encode())) == []


def test_the_bytes_of_a_plan_are_those_of_version_1() -> None:
    plan = plan_of(holdout="1/8", shuffle_documents=True, seed=7, keep=(("n", "int64"),))
    assert plan.digest == "ec3819c2e96f749900d15349b8be24e121c7dc6d4d4ae91a3d1f650f98819115"
    text = plan.encode().decode()
    assert list(json.loads(text)["settings"].items()) == [
        ("text_column", "text"),
        ("id_column", None),
        ("keep", [["n", "int64"]]),
        ("separator", None),
        ("holdout", "1/8"),
        ("shuffle_documents", True),
        ("seed", 7),
        ("tokenizer", "0" * 64),
        ("tokenizer_probe", "1" * 64),
        ("vocab_size", 512),
        ("bos", None),
        ("eos", 0),
        ("special", "plain"),
        ("shard_text_bytes", 4194304),
    ]
    both = plan_of(sample="1/3", shuffle_documents=True, parent="d", first_shard=3).encode()
    both = json.loads(both)["settings"]
    assert [name for name in both if name in ("sample", "seed", "shuffle_documents")] == [
        "sample",
        "seed",
        "shuffle_documents",
    ]
    assert list(both.items())[-2:] == [("parent", "d"), ("first_shard", 3)]
    assert (
        hashlib.sha256(plan.encode()).hexdigest()
        == "fd5d61595ebd7f1b65006b9d6272bd2a0f262132bb2b71effed9cde22091b4b2"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"eos": 0', '"eos": 1'),
        lambda text: text.replace('"eos": 0', '"eos": 0, "more": 1'),
        lambda text: text.replace('"format": "olm-plan",', ""),
        lambda text: "{}",
        lambda text: "[]",
        lambda text: "{",
    ],
)
def test_a_plan_that_was_changed_is_none(change: Callable[[str], str]) -> None:
    with pytest.raises(MalformedJson):
        Plan.decode(change(plan_of().encode().decode()).encode())


def test_a_plan_of_another_version_says_so_and_who_wrote_it(tmp_path: Path) -> None:
    later = plan_of().encode().replace(b'"version": 1', b'"version": 2, "more": []')
    (tmp_path / "plan.json").write_bytes(later)
    (tmp_path / "job.json").write_text('{"version": 9, "packages": {"olm": "7.1"}}')
    with pytest.raises(OtherVersion, match="of version 2, and this release reads version 1"):
        Plan.decode(later)
    with pytest.raises(ValidationError, match="another release of olm-data wrote") as refused:
        Plan.read(Store(tmp_path), "plan.json")
    assert "written by olm-data 7.1" in str(refused.value.why)
    assert "use the release that wrote it" in str(refused.value.fix)
    (tmp_path / "job.json").unlink()
    with pytest.raises(ValidationError, match="version 2"):
        Plan.read(Store(tmp_path), "plan.json")


def test_differences_name_the_option_the_input_and_both_values() -> None:
    stored = plan_of()
    now = plan_of([("a.jsonl", 10, "2"), ("c.jsonl", 20, "1")], eos=5)
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
    assert (plan.describe(0), plan.describe(1)) == ("a.jsonl to b.jsonl (2 files)", "b.jsonl")
    assert [shard_name(0), shard_name(123456)] == ["shard-00000", "shard-123456"]
