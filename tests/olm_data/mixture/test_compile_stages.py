"""Stages compiled: epochs to the row, caps kept, groups and files of weights recorded, ramps."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stand_in import parse_mixture, stand_in_dataset

from olm_data.errors import UsageError, ValidationError
from olm_data.extensions.report.mixture import stages_section
from olm_data.extensions.verify.training import verify_training
from olm_data.mixture import compile_stages
from olm_data.mixture.compile_stages import staircase
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import MixPlan
from olm_data.mixture.revise import longer, revised
from olm_data.mixture.summary import explain, summarise, tree, warnings
from olm_data.order.slots import normalise, slot_table
from olm_data.run_log.log import RunLog, Start

HEAD = "version: 1\nseed: 3\nsequence_length: 10\non_exhausted: {on}\nsources:\n"


def locked(sources: dict[str, tuple[int, str]], rest: str, on: str = "error") -> Lock:
    """Compile a manifest whose sources have (rows, max_epochs); `rest` are groups and stages."""
    text = HEAD.format(on=on) + "".join(
        f"  {name}: {{data: ./{name}, max_epochs: {cap}}}\n" for name, (_, cap) in sources.items()
    )
    mixture = parse_mixture(text + rest)
    opened = {name: stand_in_dataset(name, rows * 10 + 1) for name, (rows, _) in sources.items()}
    lock = MixPlan(mixture, opened).compile()
    again = Lock.decode(lock.encode(), "x.lock.json")
    assert (again.stages, again.digest) == (lock.stages, lock.digest)
    return lock


def drawn(lock: Lock) -> list[dict[str, int]]:
    """Return the rows of each source, stage by stage, counted in the schedule itself."""
    place = lock.schedule().locate(np.arange(lock.total_rows))
    starts = np.cumsum([0, *(stage.rows for stage in lock.manifest_stages)])
    names = [source.name for source in lock.sources]
    return [
        dict(zip(names, np.bincount(place.source[a:b], minlength=len(names)).tolist(), strict=True))
        for a, b in pairwise(starts.tolist())
    ]


def test_a_stage_by_epochs_sees_every_row_so_often_and_no_other() -> None:
    lock = locked(
        {"web": (7_919, "4"), "code": (104, "4")},
        "stages:\n  - {name: all, epochs: {web: 1, code: 2.5}}\n",
    )
    assert drawn(lock) == [{"web": 7_919, "code": 260}]
    place = lock.schedule().locate(np.arange(lock.total_rows))
    web = np.sort(place.row[place.source == 1])
    assert np.array_equal(web, np.arange(7_919))


def test_epochs_of_a_stage_that_fits_no_block_are_exact_too() -> None:
    lock = locked(
        {"web": (1_500_007, "4"), "code": (99_991, "4")},
        "stages:\n  - {name: all, epochs: {web: 1, code: 3}}\n"
        "  - {name: end, tokens: 1K, weights: {web: 1}}\n",
    )
    assert [(s.name, s.part, s.label) for s in lock.stages] == [
        ("all", 0, "all"),
        ("all", 1, "all.rest"),
        ("end", 0, "end"),
    ]
    in_file = [(s["name"], s.get("part_of")) for s in json.loads(lock.encode())["stages"]]
    assert in_file == [("all", None), ("all.rest", "all"), ("end", None)]
    assert Lock.decode(lock.encode(), "x.lock.json").stages == lock.stages
    for forged in (
        lock.encode().replace(b'"part_of": "all"', b'"part_of": "end"'),
        lock.encode().replace(b'"part_of": "all"', b'"part": 1'),
    ):
        with pytest.raises(ValidationError, match=r"another name than|field `part`"):
            Lock.decode(forged, "x.lock.json")
    apart = msgspec.structs.replace(lock, stages=lock.stages[::-1], digest="")
    apart = msgspec.structs.replace(apart, digest=apart.compute_digest())
    with pytest.raises(ValidationError, match="its numbers do not fit"):
        Lock.decode(apart.encode(), "x.lock.json")
    assert [s.rows_by_source for s in lock.manifest_stages] == [(299_973, 1_500_007), (0, 100)]
    for stage in lock.stages:  # whole blocks: what is drawn is a multiple of the counts
        assert divmod(stage.rows, stage.block)[1] == 0
    numbers = summarise(lock).stages
    assert [s.name for s in numbers] == ["all", "end"]
    assert numbers[0].tokens == (299_973 + 1_500_007) * 10
    assert [s.epochs for s in numbers[0].sources] == [3, 1]
    assert warnings(lock) == []
    fields = {"step": 0, "rewound": 0, "global_batch_size": 10, "world_size": 1, "skip": ()}
    start = Start(lock=lock.digest, **fields)
    accounts = verify_training(lock, RunLog(folder=Path("run"), starts=[start], steps=[])).accounts
    planned = Counter[tuple[str, str]]()
    for account in accounts:
        planned[account.stage, account.source] += account.planned
    assert planned == {("all", "code"): 299_973, ("all", "web"): 1_500_007, ("end", "web"): 100}
    assert len(accounts) == len({(a.stage, a.source, a.epoch) for a in accounts})


def test_a_group_gives_its_number_of_epochs_to_each_of_its_sources() -> None:
    lock = locked(
        {"web": (50, "4"), "c": (20, "4"), "rust": (30, "4")},
        "groups: {code: {c: 1, rust: 9}}\nstages:\n  - {name: a, epochs: {web: 1, code: 2}}\n",
    )
    assert drawn(lock) == [{"c": 40, "rust": 60, "web": 50}]


def test_weights_and_tokens_of_a_group_are_divided_by_the_weights_of_its_members() -> None:
    lock = locked(
        {"web": (900, "4"), "c": (900, "4"), "rust": (900, "4"), "maths": (900, "4")},
        "groups:\n  code: {c: 3, rust: 1}\n  hard: {code: 2, maths: 1}\n"
        "stages:\n  - {name: a, tokens: 12K, weights: {web: 1, hard: 1}}\n"
        "  - {name: b, tokens_from: {web: 1K, code: 4K}}\n",
    )
    assert drawn(lock) == [
        {"c": 300, "maths": 200, "rust": 100, "web": 600},
        {"c": 300, "maths": 0, "rust": 100, "web": 100},
    ]
    assert lock.stages[0].groups == {"hard": ("code", "maths"), "code": ("c", "rust")}
    assert lock.stages[1].groups == {"code": ("c", "rust")}


def test_a_capped_source_gives_all_it_may_and_the_others_keep_their_ratio() -> None:
    sources = {"web": (3_000, "1"), "books": (9_999, "1"), "code": (100, "2")}
    rest = "stages:\n  - {name: main, tokens: 80K, weights: {web: 20, books: 30, code: 50}}\n"
    with pytest.raises(UsageError, match="'code' is exhausted"):
        locked(sources, rest)
    lock = locked(sources, rest, "cap_and_redistribute")
    assert drawn(lock) == [{"books": 4_800, "code": 200, "web": 3_000}]
    assert lock.stages[0].capped == ("code",)
    said = warnings(lock)
    assert any(
        "'code' is capped in stage 'main': 50.00% was wanted, 200 of 8,000" in w for w in said
    )


def test_stages_before_are_served_first() -> None:
    stage = "{{name: {}, tokens: 1K, weights: {{web: 1, code: 1}}}}"
    lock = locked(
        {"web": (1_000, "1"), "code": (70, "1")},
        f"stages:\n  - {stage.format('a')}\n  - {stage.format('b')}\n  - {stage.format('c')}\n",
        "cap_and_redistribute",
    )
    assert drawn(lock) == [
        {"code": 50, "web": 50},
        {"code": 20, "web": 80},
        {"code": 0, "web": 100},
    ]


def test_a_mixture_within_its_caps_is_the_same_whatever_is_done_on_exhaustion() -> None:
    rest = "stages:\n  - {name: main, tokens: 1K, weights: {web: 1, code: 1}}\n"
    sources = {"web": (1_000, "1"), "code": (70, "1")}
    assert locked(sources, rest).digest == locked(sources, rest, "cap_and_redistribute").digest


def test_what_no_source_can_take_over_is_refused_and_the_fix_works() -> None:
    sources = {"web": (60, "1"), "code": (70, "1")}
    rest = "stages:\n  - {{name: main, tokens: {}, weights: {{web: 1, code: 3}}}}\n"
    with pytest.raises(UsageError) as error:
        locked(sources, rest.format("2K"), "cap_and_redistribute")
    assert "200 rows, but its sources have only 130 left within their max_epochs" in str(
        error.value
    )
    assert "code 70" in str(error.value)
    assert "shorten the stage to 1,300 tokens" in str(error.value)
    assert drawn(locked(sources, rest.format("1300"), "cap_and_redistribute")) == [
        {"code": 70, "web": 60}
    ]


@pytest.mark.parametrize("on", ["error", "cap_and_redistribute"])
def test_a_stage_may_cap_a_source_below_the_cap_of_the_run(on: str) -> None:
    rest = (
        "stages:\n  - {name: main, tokens: 1K, weights: {web: 1, code: 1}, max_epochs: {code: 0.5}}"
    )
    sources = {"web": (1_000, "1"), "code": (80, "1")}
    if on == "error":
        with pytest.raises(UsageError) as error:
            locked(sources, rest)
        assert "stage 'main' draws 50 rows of 'code', 0.62 epochs" in str(error.value)
        assert "max_epochs 0.5 allows 40" in str(error.value)
    else:
        assert drawn(locked(sources, rest, on)) == [{"code": 40, "web": 60}]


def test_epochs_beyond_max_epochs_are_refused_even_where_others_could_take_over() -> None:
    rest = "stages:\n  - {name: all, epochs: {web: 1, code: 3}}\n"
    with pytest.raises(UsageError, match="'code' is exhausted") as error:
        locked({"web": (10, "1"), "code": (10, "2")}, rest, "cap_and_redistribute")
    assert "a stage by epochs takes what it says" in str(error.value)


WARM = "{name: warm, tokens: 30K, weights: {web: 1}, weights_to: {web: 1, text: 3}}"


def ramped(stages: str, *, cap: str = "9", on: str = "error") -> Lock:
    sources = dict.fromkeys(("web", "code", "book"), (1_000, cap))
    return locked(sources, f"groups: {{text: {{code: 2, book: 1}}}}\nstages: [{stages}]\n", on)


weights = st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any)


@settings(max_examples=30)
@given(start=weights, end=weights, rows=st.integers(1, 1_000), steps=st.integers(1, 120))
@pytest.mark.parametrize("longest", [1 << 14, 7])
def test_every_prefix_of_a_ramp_is_its_integral(
    start: list[int], end: list[int], rows: int, steps: int, longest: int
) -> None:
    """Counted row by row against exact fractions; `longest` 7 makes the blocks of steps repeat."""
    size = max(len(start), len(end))
    a, b = (normalise([*each, *[0] * (size - len(each))]) for each in (start, end))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_stages, "STEPS", steps)
        patch.setattr(compile_stages, "LONGEST", longest)
        found = staircase(a, b, rows)
    times = -(-rows // (steps * longest))
    units = rows // times * times
    width = -(-units // (times * steps)) * times
    whole = math.lcm(*(share.denominator for share in (*a, *b)))  # in integers: shares times whole
    begin, over = ([int(share * whole) for share in shares] for shares in (a, b))
    drawn, x = [0] * size, 0
    for step in found:
        assert step.rows % sum(step.counts) == 0
        assert sum(step.wanted) == 1
        sources = slot_table(step.counts).source.tolist()
        for row in range(step.rows):
            drawn[sources[row % len(sources)]] += 1
            x += 1
            on, behind = min(x, units), max(x - units, 0)
            for s in range(size):
                rise = over[s] - begin[s]
                right = 8 * units * (begin[s] * on + over[s] * behind) + 4 * rise * on * on
                slack = 8 * units * whole * (times + 1 + (times if behind else 0))
                stair = abs(rise) * width**2  # all of them times 8 * units * whole
                assert abs(8 * units * whole * drawn[s] - right) < slack + stair
    assert x == rows


def test_a_ramp_is_one_stage_with_the_total_of_each_source() -> None:
    lock = ramped(f"{WARM}, {{name: end, tokens: 1K, weights: {{web: 1}}}}")
    warm, end = lock.manifest_stages
    assert (warm.rows, warm.tokens, end.rows) == (3_000, 30_000, 100)
    assert [part.label for part in warm.parts[:3]] == ["warm", "warm.2", "warm.3"]
    assert len(warm.parts) == compile_stages.STEPS
    source = lock.schedule().locate(np.arange(3_000)).source
    totals = np.bincount(source).tolist()
    assert totals == [*warm.rows_by_source] == [375, 750, 1_875]  # book, code, web
    tally = lock.tally(lock.schedule().locate(np.arange(3_100)))
    assert tally == {("warm", "web"): 1_875, ("warm", "code"): 750, ("warm", "book"): 375} | {
        ("end", "web"): 100
    }
    assert set(source[:10].tolist()) == {2}
    assert np.bincount(source[-300:]).argmax() == 1
    shares = {s.source: (s.rows, s.share_wanted) for s in summarise(lock).stages[0].sources}
    assert shares["web"] == (1_875, 0.625)
    assert summarise(lock).warnings == []
    assert [node.name for node in tree(lock)[0].members] == ["text", "web"]
    assert sum("warm.100: B = " in line for line in explain(lock)) == 1
    page = stages_section(lock)
    assert ">warm<" in page
    assert "warm.2" not in page


def test_a_ramp_is_cut_by_a_revision_and_cannot_be_extended() -> None:
    lock = ramped(WARM)
    mixture = parse_mixture(
        HEAD.format(on="error") + "  code: {data: ./code, max_epochs: 9}\n"
        "stages: [{name: other, tokens: 1K, weights: {code: 1}}]\n"
    )
    cut = revised(MixPlan(mixture, {"code": stand_in_dataset("code", 10_001)}), lock, 1_234)
    assert [(s.name, s.rows) for s in cut.manifest_stages] == [("warm", 1_234), ("other", 100)]
    rows = np.arange(1_234)
    old, now = (each.schedule().locate(rows) for each in (lock, cut))
    assert [lock.sources[s].name for s in old.source] == [cut.sources[s].name for s in now.source]
    assert np.array_equal(old.row, now.row)
    with pytest.raises(UsageError, match="cannot go on") as error:
        longer(lock, 1_000, "x")
    assert "its weights ramp" in str(error.value.why)


@pytest.mark.parametrize("on", ["error", "cap_and_redistribute"])
def test_a_source_of_a_ramp_is_never_drawn_beyond_its_epochs(on: str) -> None:
    with pytest.raises(UsageError, match=r"'web' is exhausted: .* 1.88 epochs") as error:
        ramped(WARM, cap="1", on=on)
    assert on == "error" or "weights_to" in str(error.value.why)


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        (
            "tokens_from: {web: 1K}, weights_to: {web: 1}",
            "weights_to: has no effect without weights or weights_file",
        ),
        ("tokens: 1K, weights: {web: 1}, weights_to: {wep: 1}", "no source 'wep'"),
        ("tokens: 1K, weights: {web: 1}, weights_to: {web: 0}", "sum to 0"),
    ],
)
def test_what_is_no_ramp_is_refused(stage: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ramped(f"{{name: a, {stage}}}")
