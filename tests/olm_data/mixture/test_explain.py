"""What `mix` shows beside the plan: each integer, and the tree of groups."""

from __future__ import annotations

import re

import msgspec
from support.stand_in import THREE_SOURCES, parse_mixture, stand_in_dataset, three_sources

from olm_data.mixture.mix import MixPlan
from olm_data.mixture.summary import explain, tree


def test_every_integer_of_a_lock_stands_in_its_explanation() -> None:
    lock = three_sources(
        [
            {"tokens": 1_234, "weights": {"a": 1, "b": 2}},
            {"tokens": 1_000, "weights": {"a": 1_000_003, "b": 770_707}},
            {"epochs": {"b": 1.5, "c": 1}},
        ]
    )
    said = "\n".join(explain(lock))
    for stage in lock.stages:
        numbers = (stage.rows, stage.tokens, stage.block, *stage.counts, *stage.rows_by_source)
        assert all(f"{number:,}" in said for number in numbers if number)
    assert re.search(r"\n  b .* 3/2 x 300 .* 450\n", said)
    assert "the common denominator 3 is at most 2^20: B = 3" in said


def test_the_tree_has_each_group_with_the_sum_of_its_members() -> None:
    text = THREE_SOURCES.replace("stages:", "groups: {g: {a: 3, h: 1}, h: {b: 1}}\nstages:")
    mixture = parse_mixture(text + "  - {name: s, tokens: 1K, weights: {g: 4, c: 1}}\n")
    lock = MixPlan(mixture, {n: stand_in_dataset(n, 4_001) for n in "abc"}).compile()
    (stage,) = tree(lock)
    group, source = msgspec.to_builtins(stage)["members"]
    assert (group["name"], group["share_wanted"], group["rows"]) == ("g", 0.8, 80)
    assert [m["name"] for m in group["members"]] == ["a", "h"]
    assert group["members"][1]["members"][0] == {
        "name": "b",
        "share_wanted": 0.2,
        "share_compiled": 0.2,
        "share_got": 0.2,
        "rows": 20,
        "epochs": 0.05,
    }
    assert (source["name"], source["rows"]) == ("c", 20)
