"""Weights that ramp over a stage: near the ramp at every row, and one stage for every reader."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stand_in import parse_mixture, stand_in_dataset

from olm_data.errors import UsageError
from olm_data.extensions.report.mixture import stages_section
from olm_data.mixture import ramp
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import MixPlan
from olm_data.mixture.ramp import staircase
from olm_data.mixture.revise import longer, revised
from olm_data.mixture.summary import explain, summarise, tree
from olm_data.order.slots import normalise, slot_table

HEAD = "version: 1\nseed: 3\nsequence_length: 10\non_exhausted: {on}\nsources:\n"
WARM = "{name: warm, tokens: 30K, weights: {web: 1}, weights_to: {web: 1, text: 3}}"


def locked(stages: str, *, cap: str = "9", on: str = "error") -> Lock:
    text = HEAD.format(on=on)
    for name in ("web", "code", "book"):
        text += f"  {name}: {{data: ./{name}, max_epochs: {cap}}}\n"
    mixture = parse_mixture(f"{text}groups: {{text: {{code: 2, book: 1}}}}\nstages: [{stages}]\n")
    opened = {name: stand_in_dataset(name, 10_001) for name in ("web", "code", "book")}
    lock = MixPlan(mixture, opened).compile()
    assert Lock.decode(lock.encode(), "x.lock.json").stages == lock.stages
    return lock


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
        patch.setattr(ramp, "STEPS", steps)
        patch.setattr(ramp, "LONGEST", longest)
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
    lock = locked(f"{WARM}, {{name: end, tokens: 1K, weights: {{web: 1}}}}")
    warm, end = lock.manifest_stages
    assert (warm.rows, warm.tokens, end.rows) == (3_000, 30_000, 100)
    assert [part.label for part in warm.parts[:3]] == ["warm", "warm.2", "warm.3"]
    assert len(warm.parts) == ramp.STEPS
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
    lock = locked(WARM)
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
        locked(WARM, cap="1", on=on)
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
        locked(f"{{name: a, {stage}}}")
