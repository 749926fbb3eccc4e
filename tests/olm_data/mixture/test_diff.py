"""Promises of comparing and extending locks: which rows stay, to the row."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stand_in import (
    STAGE,
    THREE_SOURCES,
    parse_mixture,
    rows_of,
    stand_in_dataset,
    three_sources,
)

from olm_data.mixture.diff import diff, same_rows
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import MixPlan
from olm_data.order.windowed import Windowed

SIZES = st.fixed_dictionaries({"c": st.sampled_from([200, 201])})


@settings(deadline=None, max_examples=30)
@given(st.lists(STAGE, min_size=1, max_size=3), st.lists(STAGE, max_size=3), SIZES, st.booleans())
def test_the_rows_said_to_be_the_same_are_the_same_and_the_next_one_is_not(
    first: list[dict[str, object]], other: list[dict[str, object]], sizes: dict[str, int], go: bool
) -> None:
    old, new = (
        three_sources(first),
        three_sources(first + other if go or not other else other, sizes),
    )
    ours, theirs = rows_of(old), rows_of(new)
    same = same_rows(old, new)
    assert ours[:same] == theirs[:same]
    if same < min(len(ours), len(theirs)):
        assert ours[same] != theirs[same]
    else:
        assert same == min(len(ours), len(theirs))


def test_what_changes_every_row_is_named_and_leaves_no_row_the_same() -> None:
    old = three_sources([{"tokens": 1_000, "weights": {"a": 1, "b": 1}}])
    new = Lock.decode(old.encode(), "x.lock.json")
    changed = MixPlan(
        parse_mixture(
            THREE_SOURCES.replace("seed: 3", "seed: 4") + "  - {name: s0, epochs: {a: 1}}\n"
        ),
        {name: stand_in_dataset(name, 4_001) for name in "abc"},
    ).compile()
    assert diff(old, new).differences == []
    found = diff(old, changed)
    assert found.same_rows == 0
    assert "seed 3 -> 4" in found.differences
    assert "stage s0: a 50.0000% wanted, 50 rows -> 100.0000% wanted, 400 rows" in found.differences
    assert any(line.startswith("source b: dataset ") for line in found.differences)


def test_another_order_is_named_and_leaves_no_row_the_same() -> None:
    old = three_sources([{"tokens": 1_000, "weights": {"a": 1}}])
    windowed = msgspec.structs.replace(old, order=Windowed(window_chunks=2, chunk_rows=(4, 4, 4)))
    wider = msgspec.structs.replace(old, order=Windowed(window_chunks=2, chunk_rows=(5, 4, 4)))
    unused = msgspec.structs.replace(old, order=Windowed(window_chunks=2, chunk_rows=(4, 4, 5)))
    assert 'order global -> windowed {"window_chunks":2,"chunk_rows":[4,4,4]}' in (
        diff(old, windowed).differences
    )
    assert [same_rows(windowed, other) for other in (old, wider, unused)] == [0, 0, 100]
