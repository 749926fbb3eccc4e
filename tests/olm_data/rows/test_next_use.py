"""Promises of looking ahead: the next use is known, and giving up the furthest misses least."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from olm_data.rows.shard_cache import NEVER, NextUses, victims

USES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=40)


@given(uses=USES, shard=st.integers(0, 9), step=st.integers(0, 32))
def test_the_next_use_is_the_first_one_not_before_the_step(
    uses: list[tuple[int, int]], shard: int, step: int
) -> None:
    known = NextUses([s for s, _ in uses], [n for _, n in uses])
    assert known.next_use(shard, step) == min(
        (s for s, n in uses if n == shard and s >= step), default=NEVER
    )
    order = known.in_order(step)
    assert set(order) == {n for s, n in uses if s >= step}
    assert [known.next_use(n, step) for n in order] == sorted(
        known.next_use(n, step) for n in order
    )


@given(
    sizes=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 9)),
    uses=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 9)),
    room=st.integers(-3, 40),
    later=st.integers(-1, 9),
)
def test_what_is_needed_last_goes_first_and_no_more_than_must(
    sizes: dict[str, int], uses: dict[str, int], room: int, later: int
) -> None:
    chosen = victims(sizes, uses, room, later)
    allowed = {name for name in sizes if uses.get(name, NEVER) > later}
    if chosen is None:
        assert sum(sizes[name] for name in allowed) < room
        return
    assert set(chosen) <= allowed
    assert sum(sizes[name] for name in chosen) >= room
    assert sum(sizes[name] for name in chosen[:-1]) < max(room, 1)
    kept = [uses.get(name, NEVER) for name in sizes if name not in chosen]
    assert all(uses.get(name, NEVER) >= max(kept, default=0) for name in chosen)


@given(accesses=st.lists(st.integers(0, 6), max_size=60), room=st.integers(1, 5))
def test_knowing_the_future_never_misses_more_than_least_recently_used(
    accesses: list[int], room: int
) -> None:
    known, cached, missed = NextUses(range(len(accesses)), accesses), set[int](), 0
    recent: list[int] = []
    missed_recent = 0
    for step, shard in enumerate(accesses):
        if shard not in cached:
            missed += 1
            uses = {str(n): known.next_use(n, step) for n in cached}
            gone = victims({str(n): 1 for n in cached}, uses, len(cached) + 1 - room, step)
            assert gone is not None
            cached -= {int(name) for name in gone}
            cached.add(shard)
        if shard in recent:
            recent.remove(shard)
        else:
            missed_recent += 1
            recent = recent[-(room - 1) :] if room > 1 else []
        recent.append(shard)
    assert missed <= missed_recent
