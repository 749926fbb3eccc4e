"""A run that goes on otherwise keeps its rows; what differs between two locks is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adding import add_to
from support.project import Project
from support.small_datasets import random_shards, write_dataset
from support.stand_in import (
    STAGE,
    THREE_SOURCES,
    parse_mixture,
    rows_of,
    stand_in_dataset,
    three_sources,
)

from olm_data.cli import cli
from olm_data.config.values import Values
from olm_data.errors import ConflictError, InputError, UsageError, ValidationError
from olm_data.mixture import mix as verb
from olm_data.mixture.diff import diff, same_rows
from olm_data.mixture.lock import Lock
from olm_data.mixture.manifest import filled_in, mixture_of
from olm_data.mixture.mix import MixPlan
from olm_data.mixture.revise import extend, longer, revise, revised, rows_at
from olm_data.mixture.summary import explain
from olm_data.order.schedule import sample_rows, schedule_sha256
from olm_data.order.slots import slot_table
from olm_data.order.windowed import Windowed

SIZES = {"a": 400, "b": 300, "c": 200, "d": 150, "aa": 90}


def go_on(
    old: Lock, rows: int, stages: list[dict[str, Any]], sources: str = "a b c", **keys: Any
) -> Lock:
    """Revise a lock of `three_sources` at a row, by a manifest of these sources and stages."""
    data: dict[str, Any] = {
        "version": 1,
        "sources": {s: {"data": f"./{s}", "max_epochs": 9} for s in sources.split()},
        "stages": stages,
        **keys,
    }
    values = Values.parse(json.dumps(data), "new.yaml", numbers="exact", digits_only=True)
    mixture = mixture_of(filled_in(values, old))
    datasets = {s.name: stand_in_dataset(s.name, SIZES[s.name] * 10 + 1) for s in mixture.sources}
    return revised(MixPlan(mixture, datasets), old, rows)


def slots(lock: Lock, first: int) -> list[tuple[str, int]]:
    """Return source and sequence length of each row of the stages from `first` on, slot by slot."""
    found: list[tuple[str, int]] = []
    for stage, length in list(zip(lock.stages, lock.sequence_lengths, strict=True))[first:]:
        block = [(lock.sources[s].name, length) for s in slot_table(stage.counts).source.tolist()]
        found += (block * (stage.rows // len(block) + 1))[: stage.rows]
    return found


LATER = st.one_of(
    STAGE,
    st.builds(
        lambda name, n: {"epochs": {name: n}}, st.sampled_from("abd"), st.sampled_from([0.1, 0.25])
    ),
    st.builds(
        lambda tokens, d, aa, length: {
            "tokens": tokens,
            "weights": {"d": d, "aa": aa},
            "sequence_length": length,
        },
        st.integers(10, 600),
        st.integers(1, 3),
        st.integers(0, 3),
        st.sampled_from([10, 5]),
    ),
)

REVISIONS = st.lists(
    st.tuples(st.floats(0.01, 1), st.lists(LATER, min_size=1, max_size=2)), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        LATER.filter(lambda s: not {"d"} & {*s.get("epochs", {}), *s.get("weights", {})}),
        min_size=1,
        max_size=3,
    ),
    REVISIONS,
)
def test_revisions_of_revisions_keep_the_rows_before_and_repeat_and_lose_none(
    stages: list[dict[str, Any]], revisions: list[tuple[float, list[dict[str, Any]]]]
) -> None:
    lock = three_sources(stages)
    older: list[tuple[Lock, int]] = []
    expected = slots(lock, 0)
    for number, (share, later) in enumerate(revisions):
        old, rows = lock, max(1, round(share * lock.total_rows))
        named = [stage | {"name": f"r{number}-{i}"} for i, stage in enumerate(later)]
        lock = go_on(old, rows, named, "a b c d aa")

        first = next(i for i, stage in enumerate(lock.stages) if stage.name == named[0]["name"])
        expected = expected[:rows] + slots(lock, first)
        lengths = np.repeat(lock.sequence_lengths, [stage.rows for stage in lock.stages]).tolist()
        drawn = [(name, epoch, row) for (name, _), epoch, row in map(tuple, rows_of(lock))]
        names = [name for name, _, _ in drawn]
        assert [*zip(names, lengths, strict=True)] == expected
        for name in set(names):
            mine = [(epoch, row) for source, epoch, row in drawn if source == name]
            size = SIZES[name]
            assert [epoch for epoch, _ in mine] == [i // size for i in range(len(mine))]
            assert len(set(mine)) == len(mine)

        older = [(before, min(n, rows)) for before, n in older] + [(old, rows)]
        assert [(e.digest, e.rows) for e in lock.extends] == [(x.digest, n) for x, n in older]
        for (before, n), named_there in zip(older, lock.extends, strict=True):
            assert rows_of(lock)[:n] == rows_of(before)[:n]
            assert schedule_sha256(before.schedule(), sample_rows(n)) == named_there.order_sha256
            assert before.digest in lock.digests(n)
            assert before.digest not in lock.digests(n + 1)
        assert sum(stage.tokens for stage in lock.stages) // 10 == lock.total_rows
        assert Lock.decode(lock.encode(), "x.lock.json").digest == lock.digest


OLD = three_sources([{"tokens": 2_000, "weights": {"a": 3, "b": 1}}])
NEXT = {"name": "next", "tokens": 1_000, "weights": {"a": 1}}


@pytest.mark.parametrize(
    ("stages", "keys", "says", "fix"),
    [
        ([NEXT], {"seed": 4}, "seed is 4, in the lock it is 3", "leave seed out"),
        ([NEXT], {"sequence_length": 20}, "sequence_length is 20", "leave sequence_length out"),
        ([NEXT], {"packing": "document"}, "packing is document", "leave packing out"),
        ([NEXT], {"order": "windowed"}, "order is windowed, in the lock it is global", "order out"),
        ([NEXT | {"name": "s0"}], {}, "'s0' is the name of a stage, and of one before", "s0-2"),
        (
            [NEXT | {"tokens": 35_000}],
            {},
            "max_epochs 9 allows 3,600 rows, and 150 are drawn before",
            "at most 34,500 tokens of 'a'",
        ),
    ],
)
def test_what_contradicts_the_kept_part_is_refused_with_what_to_type(
    stages: list[dict[str, Any]], keys: dict[str, Any], says: str, fix: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        go_on(OLD, 200, stages, **keys)
    assert says in refusal.value.what
    assert fix in str(refusal.value.fix)


def test_a_stage_that_is_cut_ends_with_its_last_row_and_whole_ones_stay() -> None:
    old = three_sources([{"tokens": 1_005, "weights": {"a": 1}}, {"epochs": {"b": 1}}])
    cut, whole = go_on(old, 150, [NEXT]), go_on(old, 100, [NEXT])
    assert [stage.tokens for stage in cut.stages] == [1_005, 495, 1_000]
    assert [stage.tokens for stage in whole.stages] == [1_005, 1_000]
    assert [stage.rows for stage in whole.stages] == [100, 100]
    assert "  rows: sum of floor(epochs x rows of the source) is 300, cut by a revision = 50" in (
        explain(cut)
    )


def test_a_cap_counts_what_the_kept_part_drew() -> None:
    kept = three_sources([{"tokens": 2_000, "weights": {"b": 1}}])
    capped = go_on(
        kept,
        200,
        [{"name": "next", "tokens": 30_000, "weights": {"a": 1, "b": 9}}],
        on_exhausted="cap_and_redistribute",
    )
    assert capped.rows_drawn([s.name for s in capped.sources].index("b")) == 9 * 300
    assert capped.total_rows == 200 + 3_000


def test_a_source_that_was_drawn_keeps_its_rows_and_one_that_was_not_may_change() -> None:
    used = SIZES | {}
    SIZES.update(b=301, c=201)
    try:
        go_on(OLD, 200, [NEXT], "a c")
        with pytest.raises(
            UsageError, match=r"source .b. is another one than in the lock"
        ) as error:
            go_on(OLD, 200, [NEXT], "a b")
    finally:
        SIZES.update(used)
    assert "give it another name, such as b-2" in str(error.value)


def test_windows_go_on_and_new_sources_get_their_own() -> None:
    old = msgspec.structs.replace(OLD, order=Windowed(window_chunks=2, chunk_rows=(40, 30, 20)))
    new = go_on(old, 150, [NEXT | {"weights": {"a": 1, "aa": 1}}], "a aa", chunk_tokens=70)
    assert [s.name for s in new.sources] == ["a", "aa", "b"]
    assert new.order == Windowed(window_chunks=2, chunk_rows=(40, 7, 30))
    with pytest.raises(UsageError, match="another one in the lock"):
        go_on(old, 150, [NEXT], order="windowed", window_chunks=3)


def test_a_place_is_the_last_whole_row_and_inside_the_run() -> None:
    assert [rows_at(OLD, text) for text in ("10", "1.239K", "2K")] == [1, 123, 200]
    for text in ("9", "2.01K"):
        with pytest.raises(UsageError, match="goes from row 0 to 200"):
            rows_at(OLD, text)
    with pytest.raises(InputError, match="there is no checkpoint here"):
        rows_at(OLD, "no-such-run")


@pytest.mark.parametrize(
    ("manifest", "state", "says"),
    [
        ('{"format": "olm-checkpoint", "lock_digest": ""}', "{}", "came from no mixture lock"),
        ('{"format": "olm-checkpoint", "lock_digest": "a"}', "{}", "no whole checkpoint"),
        ('{"format": "olm-checkpoint", "lock_digest": "a"}', None, "no whole checkpoint"),
        ("[", "{}", "no whole checkpoint"),
        (
            '{"format": "olm-checkpoint", "lock_digest": "a"}',
            '{"data_loader": {"rows_consumed": 5}}',
            "another mixture: 5 rows of lock a,",
        ),
    ],
)
def test_a_checkpoint_that_says_no_place_in_the_lock_is_refused(
    tmp_path: Path, manifest: str, state: str | None, says: str
) -> None:
    place = tmp_path / "step00000005"
    place.mkdir()
    (place / "manifest.json").write_text(manifest)
    if state is not None:
        (place / "train.json").write_text(state)
    for at in (tmp_path, place):
        with pytest.raises((InputError, ValidationError), match=says):
            rows_at(OLD, str(at))


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("web", "code", "books"):
        write_dataset(tmp_path / name, random_shards(rng, [[90] * 40]))
    (tmp_path / "m.yaml").write_text(
        "version: 1\nseed: 7\nsequence_length: 16\npacking: best_fit\n"
        "sources: {web: {data: web}, code: {data: code}}\n"
        "stages: [{name: main, tokens: 4K, weights: {web: 3, code: 1}}]\n"
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "n.yaml").write_text(
        "version: 1\nsources: {web: {data: ../web}, books: {data: ../books}}\n"
        "stages: [{name: next, tokens: 1600, weights: {web: 1, books: 1}}]\n"
    )
    verb.mix(str(tmp_path / "m.yaml"))
    return tmp_path


def test_the_command_writes_a_lock_beside_the_old_one_and_says_where_all_stands(lab: Path) -> None:
    lock, new = str(lab / "m.lock.json"), str(lab / "sub" / "n.yaml")
    words = ["mix", "--revise", lock, "--at", "1.61K", new]
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert done.exit_code == 0, done.output
    assert "rows 0 to 99 are those of lock" in done.output
    assert "source web: goes on at row 75 of " in done.output
    assert "source code: goes on at row 25 of " in done.output
    assert "source books: new, " in done.output
    written = Lock.read(lab / "n.lock.json")
    assert rows_of(written)[:100] == rows_of(Lock.read(lock))[:100]
    assert written.total_rows == 200
    assert [d.digest for d in written.open_datasets()] == [s.dataset for s in written.sources]
    assert all(plan is not None for plan in written.open_plans(verify="full"))
    again = revise(lock, "1600", new)
    assert again.status == "unchanged"
    with pytest.raises(ConflictError):
        revise(lock, "800", new)
    with pytest.raises(UsageError, match="beside the older one"):
        revise(lock, "800", new, str(lab / "sub" / "n.lock.json"))
    for refused in ([*words[:3], new], ["mix", "--at", "1K", new], [*words, "--extend", "1K"]):
        error = CliRunner().invoke(cli, refused, standalone_mode=False).exception
        assert isinstance(error, UsageError)


def test_a_grown_dataset_goes_on_with_the_version_of_the_lock_and_says_so(project: Project) -> None:
    texts = [f"story number {n} of web" for n in range(60)]
    project.make([project.write("a.jsonl", texts)], "web")
    manifest = project / "m.yaml"
    manifest.write_text(
        "version: 1\nsequence_length: 8\nsources: {web: {data: web}}\n"
        "stages: [{name: main, tokens: 400, weights: {web: 1}}]\n"
    )
    lock = verb.mix(str(manifest))
    add_to(project / "web", project.write("b.jsonl", [f"new {n}" for n in range(40)]))
    manifest.with_name("n.yaml").write_text(
        "version: 1\nsources: {web: {data: web}, web-2: {data: web}}\n"
        "stages: [{name: next, tokens: 400, weights: {web: 1, web-2: 1}}]\n"
    )
    done = revise(lock.path, "200", str(project / "n.yaml"))
    web, grown = done.lock.sources
    assert web.dataset == lock.lock.sources[0].dataset != grown.dataset
    assert [text for text in done.warnings if "'web' has grown since" in text]
    assert [text for text in done.warnings if "'web' and 'web-2' share 60 documents" in text]
    assert rows_of(done.lock)[:25] == rows_of(lock.lock)[:25]
    assert [d.digest for d in Lock.read(done.path).open_datasets()] == [web.dataset, grown.dataset]


# A longer run begins with the rows of the one it extends, and says so.
@settings(deadline=None, max_examples=15)
@given(st.lists(STAGE, min_size=1, max_size=3), st.integers(10, 500), st.integers(10, 500))
def test_an_extended_run_begins_with_the_old_one_and_says_so(
    stages: list[dict[str, object]], more: int, again: int
) -> None:
    old = three_sources(stages, {"a": 4_000, "b": 3_000, "c": 2_000})
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
        assert older.digest in longest.digests(older.rows)
        assert older.digest not in longest.digests(older.rows + 1)
    assert longest.digests(longest.total_rows)[-1] == longest.digest
    assert long.digest not in old.digests(0)
    assert Lock.decode(longest.encode(), "x.lock.json").extends == longest.extends


def test_an_extension_beyond_max_epochs_is_refused_and_its_fix_works() -> None:
    old = three_sources([{"tokens": 4_000, "weights": {"b": 1, "c": 1}}])
    with pytest.raises(UsageError, match="'c' is exhausted") as error:
        longer(old, 20_000, "old.lock.json")
    assert "draws 1,200 rows, 6.00 epochs of its 200; its caps allow 800" in str(error.value)
    fits = int(str(error.value).split("at most ")[1].split(" ")[0].replace(",", ""))
    assert longer(old, fits, "old.lock.json").total_rows == 400 + fits // 10
    assert fits == 11_980  # 2 x 799 rows in all


def test_a_stage_of_exact_rows_is_not_extended() -> None:
    with pytest.raises(UsageError, match="exact number of rows"):
        longer(three_sources([{"epochs": {"a": 1}}]), 1_000, "old.lock.json")


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
    found = diff(verb.read_or_compile(str(manifest)), verb.read_or_compile(done.path))
    assert found.same_rows == found.old_rows


NEW_SIZES = st.fixed_dictionaries({"c": st.sampled_from([200, 201])})


@settings(deadline=None, max_examples=30)
@given(
    st.lists(STAGE, min_size=1, max_size=3), st.lists(STAGE, max_size=3), NEW_SIZES, st.booleans()
)
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
