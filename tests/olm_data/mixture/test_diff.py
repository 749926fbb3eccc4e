"""Promises of comparing and extending locks: which rows stay, to the row."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.datasets import random_shards, write_dataset
from support.stand_in import stand_in_dataset

from olm_data.errors import ConflictError, UsageError
from olm_data.mixture import mix as verb
from olm_data.mixture.compile import compile_lock, parse_mixture
from olm_data.mixture.diff import diff, same_rows
from olm_data.mixture.explain import explain, tree
from olm_data.mixture.extend import extend, longer
from olm_data.mixture.lock import Lock
from olm_data.order.fingerprint import sample_rows, schedule_sha256
from olm_data.order.windowed import Windowed

MANIFEST = """\
version: 1
seed: 3
sequence_length: 10
sources: {a: {data: ./a, max_epochs: 9}, b: {data: ./b, max_epochs: 9}, c: {data: ./c}}
stages:
"""


def locked(stages: list[dict[str, object]], rows: dict[str, int] | None = None) -> Lock:
    lines = [f"  - {json.dumps({'name': f's{i}'} | stage)}\n" for i, stage in enumerate(stages)]
    mixture = parse_mixture(MANIFEST + "".join(lines))
    sizes = {"a": 400, "b": 300, "c": 200} | (rows or {})
    opened = {name: stand_in_dataset(name, n * 10 + 1) for name, n in sizes.items()}
    return compile_lock(mixture, opened)


def rows_of(lock: Lock) -> list[tuple[object, ...]]:
    """Return what every row of a run is, by brute force."""
    place = lock.schedule().locate(np.arange(lock.total_rows))
    datasets = [(source.name, source.dataset) for source in lock.sources]
    found = zip(place.source.tolist(), place.epoch.tolist(), place.row.tolist(), strict=True)
    return [(datasets[s], epoch, row) for s, epoch, row in found]


STAGE = st.builds(
    lambda tokens, weights: {"tokens": tokens, "weights": dict(zip("abc", weights, strict=True))},
    st.integers(1, 40).map(lambda n: n * 10),
    st.tuples(*[st.integers(0, 3)] * 3).filter(any),
)
SIZES = st.fixed_dictionaries({"c": st.sampled_from([200, 201])})


@settings(deadline=None, max_examples=30)
@given(st.lists(STAGE, min_size=1, max_size=3), st.lists(STAGE, max_size=3), SIZES, st.booleans())
def test_the_rows_said_to_be_the_same_are_the_same_and_the_next_one_is_not(
    first: list[dict[str, object]], other: list[dict[str, object]], sizes: dict[str, int], go: bool
) -> None:
    old, new = locked(first), locked(first + other if go or not other else other, sizes)
    ours, theirs = rows_of(old), rows_of(new)
    same = same_rows(old, new)
    assert ours[:same] == theirs[:same]
    if same < min(len(ours), len(theirs)):
        assert ours[same] != theirs[same]
    else:
        assert same == min(len(ours), len(theirs))


def test_what_changes_every_row_is_named_and_leaves_no_row_the_same() -> None:
    old = locked([{"tokens": 1_000, "weights": {"a": 1, "b": 1}}])
    new = Lock.decode(old.encode(), "x.lock.json")
    changed = compile_lock(
        parse_mixture(MANIFEST.replace("seed: 3", "seed: 4") + "  - {name: s0, epochs: {a: 1}}\n"),
        {name: stand_in_dataset(name, 4_001) for name in "abc"},
    )
    assert diff(old, new).lines == ()
    found = diff(old, changed)
    assert found.same_rows == 0
    assert "seed: 3 -> 4" in found.lines
    assert "stage s0: a 50.0000% -> 100.0000% wanted, 50 -> 400 rows" in found.lines
    assert any(line.startswith("source b: dataset ") for line in found.lines)


def test_another_order_is_named_and_leaves_no_row_the_same() -> None:
    old = locked([{"tokens": 1_000, "weights": {"a": 1}}])
    windowed = msgspec.structs.replace(old, order=Windowed(window_chunks=2, chunk_rows=(4, 4, 4)))
    wider = msgspec.structs.replace(old, order=Windowed(window_chunks=2, chunk_rows=(5, 4, 4)))
    unused = msgspec.structs.replace(old, order=Windowed(window_chunks=2, chunk_rows=(4, 4, 5)))
    assert 'order: global -> windowed {"window_chunks":2,"chunk_rows":[4,4,4]}' in (
        diff(old, windowed).lines
    )
    assert [same_rows(windowed, other) for other in (old, wider, unused)] == [0, 0, 100]


@settings(deadline=None, max_examples=15)
@given(st.lists(STAGE, min_size=1, max_size=3), st.integers(10, 500), st.integers(10, 500))
def test_an_extended_run_begins_with_the_old_one_and_says_so(
    stages: list[dict[str, object]], more: int, again: int
) -> None:
    old = locked(stages, {"a": 4_000, "b": 3_000, "c": 2_000})
    long = longer(old, more, "old.lock.json")
    longest = longer(long, again, "long.lock.json")
    assert rows_of(longest)[: long.total_rows] == rows_of(long)
    assert rows_of(long)[: old.total_rows] == rows_of(old)
    assert long.total_rows * 10 >= old.total_rows * 10 + more - 9
    assert [(e.digest, e.rows) for e in longest.extends] == [
        (old.digest, old.total_rows),
        (long.digest, long.total_rows),
    ]
    for older in longest.extends:
        rows = sample_rows(older.rows)
        assert schedule_sha256(longest.schedule(), rows) == older.order_sha256
    assert Lock.decode(longest.encode(), "x.lock.json").extends == longest.extends


def test_the_order_digest_notices_one_row_that_moved() -> None:
    old = locked([{"tokens": 400, "weights": {"a": 1, "b": 1}}])
    schedule, rows = old.schedule(), np.arange(old.total_rows)
    swapped = rows.copy()
    swapped[[5, 7]] = swapped[[7, 5]]
    assert schedule_sha256(schedule, rows) != schedule_sha256(schedule, swapped)


def test_a_sample_of_a_long_run_has_both_ends_and_no_row_twice() -> None:
    for rows in (1, 65_536, 65_537, 10**6 + 3, 2**50):
        sample = sample_rows(rows)
        assert sample[0] == 0
        assert sample[-1] == rows - 1
        assert len(np.unique(sample)) == len(sample) == min(rows, 65_536)


def test_an_extension_beyond_max_epochs_is_refused_and_its_fix_works() -> None:
    old = locked([{"tokens": 4_000, "weights": {"b": 1, "c": 1}}])
    with pytest.raises(UsageError, match="'c' is exhausted") as error:
        longer(old, 20_000, "old.lock.json")
    assert "draws 1,200 rows, 6.00 epochs of its 200; its caps allow 800" in str(error.value)
    fits = int(str(error.value).split("at most ")[1].split(" ")[0].replace(",", ""))
    assert longer(old, fits, "old.lock.json").total_rows == 400 + fits // 10
    assert fits == 11_980  # 2 x 799 rows in all


def test_a_stage_of_exact_rows_is_not_extended() -> None:
    with pytest.raises(UsageError, match="exact number of rows"):
        longer(locked([{"epochs": {"a": 1}}]), 1_000, "old.lock.json")


def test_a_longer_lock_is_written_beside_the_old_one_and_neither_is_replaced(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    write_dataset(tmp_path / "web", random_shards(rng, [[100] * 50]))
    manifest = tmp_path / "m.yaml"
    manifest.write_text(
        "version: 1\nsequence_length: 16\nsources: {web: {data: web}}\n"
        "stages: [{name: main, tokens: 8K, weights: {web: 1}}]\n"
    )
    old = verb.mix(str(manifest))
    before = Path(old.path).read_bytes()
    done = extend(str(manifest), 1_600, None)
    assert done.path == str(tmp_path / "m-longer.lock.json")
    assert Path(old.path).read_bytes() == before
    assert Lock.read(done.path).total_rows == old.lock.total_rows + 100
    assert [d.digest for d in Lock.read(done.path).open_datasets()] == [
        done.lock.sources[0].dataset
    ]
    with pytest.raises(ConflictError):
        extend(str(manifest), 3_200, None)
    with pytest.raises(UsageError, match="beside the older one"):
        extend(str(manifest), 1_600, str(tmp_path / "sub" / "x.json"))
    assert diff(verb.read_or_compile(str(manifest)), verb.read_or_compile(done.path)).extends


def test_every_integer_of_a_lock_stands_in_its_explanation() -> None:
    lock = locked(
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
    assert "b: floor(3/2 epochs x 300 rows) = 450 rows" in said
    assert "the common denominator 3 is at most 2^20: B = 3" in said


def test_the_tree_has_each_group_with_the_sum_of_its_members() -> None:
    text = MANIFEST.replace("stages:", "groups: {g: {a: 3, h: 1}, h: {b: 1}}\nstages:")
    mixture = parse_mixture(text + "  - {name: s, tokens: 1K, weights: {g: 4, c: 1}}\n")
    lock = compile_lock(mixture, {n: stand_in_dataset(n, 4_001) for n in "abc"})
    (stage,) = tree(lock)
    group, source = stage["members"]
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
