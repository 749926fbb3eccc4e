"""A run that goes on otherwise keeps its rows, and no source repeats or loses one."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stand_in import STAGE, rows_of, stand_in_dataset, three_sources

from olm_data.config.values import Values
from olm_data.mixture.lock import Lock
from olm_data.mixture.manifest import _fill_in, mixture_of
from olm_data.mixture.mix import MixPlan
from olm_data.mixture.revise import revised
from olm_data.order.schedule import sample_rows, schedule_sha256

SIZES = {"a": 400, "b": 300, "c": 200, "d": 150, "aa": 90}


def go_on(
    old: Lock, rows: int, stages: list[dict[str, Any]], sources: str = "abc", **keys: Any
) -> Lock:
    """Revise a lock of `three_sources` at a row, by a manifest of these sources and stages."""
    data = {
        "version": 1,
        "sources": {s: {"data": f"./{s}", "max_epochs": 9} for s in sources.split() or sources},
        "stages": stages,
        **keys,
    }
    values = Values.parse(json.dumps(data), "new.yaml", numbers="exact", digits_only=True)
    _fill_in(values, old)
    mixture = mixture_of(values)
    datasets = {s.name: stand_in_dataset(s.name, SIZES[s.name] * 10 + 1) for s in mixture.sources}
    return revised(MixPlan(mixture, datasets), old, rows)


def naive(parts: list[tuple[Lock, int]]) -> list[str]:
    """Return the source of each row: `rows` of each lock's own stages, slot by slot."""
    return [name for lock, rows in parts for name in sources_of(lock)[:rows]]


def sources_of(lock: Lock) -> list[str]:
    place = lock.schedule().locate(np.arange(lock.total_rows))
    return [lock.sources[s].name for s in place.source.tolist()]


REVISION = st.tuples(
    st.floats(0.01, 1),
    st.lists(
        st.one_of(
            STAGE,
            st.builds(
                lambda s, e: {"epochs": {s: e}},
                st.sampled_from("abd"),
                st.sampled_from([0.1, 0.25]),
            ),
            st.builds(
                lambda tokens, d, a, length: {
                    "tokens": tokens,
                    "weights": {"d": d, "aa": a},
                    "sequence_length": length,
                },
                st.integers(10, 600),
                st.integers(1, 3),
                st.integers(0, 3),
                st.sampled_from([10, 5]),
            ),
        ),
        min_size=1,
        max_size=2,
    ),
)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(STAGE, min_size=1, max_size=3), st.lists(REVISION, min_size=1, max_size=4), st.data()
)
def test_revisions_of_revisions_keep_the_rows_before_and_repeat_and_lose_none(
    stages: list[dict[str, Any]], revisions: list[tuple[float, list[dict[str, Any]]]], data: Any
) -> None:
    lock = three_sources(stages)
    older: list[tuple[Lock, int]] = []  # each lock before, and the rows that still stand of it
    expected = sources_of(lock)
    for number, (share, later) in enumerate(revisions):
        old, rows = lock, max(1, round(share * lock.total_rows))
        named = [stage | {"name": f"r{number}-{i}"} for i, stage in enumerate(later)]
        lock = go_on(old, rows, named, "a b c d aa")
        # the first part, row by row, and what each row is trained as
        assert rows_of(lock)[:rows] == rows_of(old)[:rows]
        lengths = [np.repeat(x.sequence_lengths, [s.rows for s in x.stages]) for x in (old, lock)]
        assert lengths[0][:rows].tolist() == lengths[1][:rows].tolist()
        # new stages draw as a run of their own would, slot by slot
        alone = go_on_alone(lock, len(named), rows)
        expected = expected[:rows] + alone
        assert sources_of(lock) == expected
        older = [(x, min(n, rows)) for x, n in older] + [(old, rows)]
        assert [(e.digest, e.rows) for e in lock.extends] == [(x.digest, n) for x, n in older]
        for before, n in older:
            assert rows_of(lock)[:n] == rows_of(before)[:n]
            assert before.digest in lock.digests(n)
            assert before.digest not in lock.digests(n + 1)
        for e in lock.extends:
            assert schedule_sha256(lock.schedule(), sample_rows(e.rows)) == e.order_sha256
        # what each source gives over the whole run: its rows, each epoch's all before the next
        seen: dict[str, list[tuple[object, ...]]] = {}
        for (name, _), *row in rows_of(lock):  # type: ignore[misc]
            seen.setdefault(name, []).append(tuple(row))
        for name, drawn in seen.items():
            size = SIZES[name]
            assert [epoch for epoch, _ in drawn] == [i // size for i in range(len(drawn))]
            assert set(Counter(drawn).values()) == {1}
            whole = len(drawn) // size * size
            assert (
                sorted(row for epoch, row in drawn[:whole] if epoch == 0)
                == [*range(size)][: size if whole else 0]
            )
        assert Lock.decode(lock.encode(), "x.lock.json") == Lock.decode(
            lock.encode(), "x.lock.json"
        )
        assert sum(s.tokens for s in lock.stages) // 10 == lock.total_rows


def go_on_alone(lock: Lock, stages: int, rows: int) -> list[str]:
    """Return the sources of the rows that new stages draw, from their blocks alone."""
    from olm_data.order.slots import slot_table

    first = len(lock.stages)
    found = lock.total_rows
    while found > rows:
        first -= 1
        found -= lock.stages[first].rows
    assert found == rows
    names: list[str] = []
    for stage in lock.stages[first:]:
        block = [lock.sources[s].name for s in slot_table(stage.counts).source.tolist()]
        names += (block * (stage.rows // len(block) + 1))[: stage.rows]
    return names
