"""Stages and groups of a manifest: what weights may say, and where they come from."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stand_in import parse_mixture, stand_in_dataset

from olm_data.errors import InputError, UsageError
from olm_data.mixture.mix import MixPlan
from olm_data.mixture.stage_spec import capacity, expand, fill, leaves, members, water_fill
from olm_data.order.slots import exact_parts, round_amounts

HEAD = "version: 1\nseed: 3\nsequence_length: 10\non_exhausted: error\nsources:\n"


def test_weights_from_a_file_are_those_of_the_file_and_its_digest_is_locked(tmp_path: Path) -> None:
    raw = b'{"web": 0.30000000000000004, "code": 7e-1}\n'
    (tmp_path / "weights.json").write_bytes(raw)
    head = HEAD + "  web: {data: ./web}\n  code: {data: ./code}\n"
    text = head + "stages:\n  - {name: a, tokens: 1K, weights_file: weights.json}\n"
    mixture = parse_mixture(text, folder=str(tmp_path))
    opened = {name: stand_in_dataset(name, 10_001) for name in ("web", "code")}
    lock = MixPlan(mixture, opened).compile()
    assert lock.stages[0].weights_file == {
        "name": "weights.json",
        "sha256": hashlib.sha256(raw).hexdigest(),
    }
    share = Fraction("0.30000000000000004")
    assert Fraction(lock.stages[0].wanted[1]) == share / (share + Fraction("0.7"))
    (tmp_path / "weights.json").write_text('{"web": 1,\n "cod": 2}')
    with pytest.raises(UsageError, match="no source 'cod'") as error:
        parse_mixture(text, folder=str(tmp_path))
    assert str(error.value.where).endswith("weights.json:2")
    (tmp_path / "weights.json").unlink()
    with pytest.raises(InputError, match="cannot read the file with the weights") as missing:
        parse_mixture(text, folder=str(tmp_path))
    assert "(from manifest.yaml:9)" in str(missing.value)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ("{code: {web: 1, code: 1}}", "group 'code' contains itself: code > code"),
        ("{code: {hard: 1}, hard: {code: 1}}", "contains itself: hard > code > hard"),
        ("{a: {web: 1}, b: {a: 1, web: 1}}", "source 'web' is reached twice"),
        ("{web: {c: 1}}", "'web' is a source and a group"),
        ("{a: {wep: 1}}", "no source 'wep'"),
        ("{a: {web: 0}}", "sum to 0"),
        ("{a: {}}", "groups.a is empty"),
    ],
)
def test_groups_that_are_no_tree_are_refused_with_their_line(groups: str, says: str) -> None:
    text = HEAD + "  web: {data: ./web}\n  c: {data: ./c}\n"
    with pytest.raises(UsageError) as error:
        parse_mixture(text + f"groups: {groups}\nstages: [{{name: a, epochs: {{web: 1}}}}]\n")
    assert says in str(error.value)
    assert error.value.where == "manifest.yaml:8"


# Promises of groups: shares stay exact, and what one source lacks its nearest neighbours give.
F = Fraction
GROUPS = {"code": {"python": F(3), "rust": F(1)}, "hard": {"code": F(1), "maths": F(1)}}
WEIGHTS = {"web": F(70), "hard": F(30)}


def test_nested_groups_divide_their_share_exactly() -> None:
    tree = expand(WEIGHTS, GROUPS)
    assert leaves(tree) == {
        "web": F(7, 10),
        "python": F(9, 80),
        "rust": F(3, 80),
        "maths": F(3, 20),
    }
    assert members(tree) == {"hard": ("code", "maths"), "code": ("python", "rust")}


def test_what_a_source_lacks_comes_from_its_group_first_and_then_from_the_groups_neighbours() -> (
    None
):
    tree = expand(WEIGHTS, GROUPS)
    plenty = dict.fromkeys(leaves(tree), 10_000)
    short = fill(tree, plenty | {"rust": 5}, F(800))
    assert short == {"web": F(560), "python": F(115), "rust": F(5), "maths": F(120)}
    shorter = fill(tree, plenty | {"rust": 5, "python": 15}, F(800))
    assert shorter == {"web": F(560), "python": F(15), "rust": F(5), "maths": F(220)}
    shortest = fill(tree, plenty | {"rust": 5, "python": 15, "maths": 20}, F(800))
    assert shortest == {"web": F(760), "python": F(15), "rust": F(5), "maths": F(20)}


LIMITED = st.lists(
    st.tuples(st.integers(0, 50).map(F), st.integers(0, 10_000)), min_size=1, max_size=8
).filter(lambda pairs: any(weight for weight, _ in pairs))


@given(LIMITED, st.integers(0, 60).map(lambda sixtieth: F(sixtieth, 60)))
def test_filling_keeps_every_limit_the_total_and_the_ratio_of_those_below_their_limits(
    pairs: list[tuple[Fraction, int]], part: Fraction
) -> None:
    weights, limits = [w for w, _ in pairs], [n for _, n in pairs]
    total = part * sum(n for w, n in pairs if w)
    amounts = water_fill(weights, limits, total)
    assert sum(amounts) == total
    assert all(0 <= a <= n for a, n in zip(amounts, limits, strict=True))
    assert all(not a for a, w in zip(amounts, weights, strict=True) if not w)
    free = [a / w for a, n, w in zip(amounts, limits, weights, strict=True) if w and a < n]
    full = [a / w for a, n, w in zip(amounts, limits, weights, strict=True) if w and a == n]
    assert len(set(free)) <= 1
    assert not free or max(full, default=F(0)) <= free[0]  # the capped have less than their share
    with pytest.raises(ValueError, match="limits sum to less"):
        water_fill(weights, limits, sum(n for w, n in pairs if w) + F(1, 7))


@given(LIMITED, st.integers(0, 60).map(lambda sixtieth: F(sixtieth, 60)))
def test_rounding_amounts_keeps_whole_limits_and_the_total(
    pairs: list[tuple[Fraction, int]], part: Fraction
) -> None:
    total = int(part * sum(n for w, n in pairs if w))
    amounts = water_fill([w for w, _ in pairs], [n for _, n in pairs], F(total))
    rows = round_amounts(amounts, total)
    assert sum(rows) == total
    assert all(r <= n for r, (_, n) in zip(rows, pairs, strict=True))
    assert all(abs(r - a) < 1 for r, a in zip(rows, amounts, strict=True))


@given(st.lists(st.integers(0, 1 << 45), min_size=1, max_size=30))
def test_the_parts_of_a_stage_draw_exactly_its_rows(rows: list[int]) -> None:
    drawn = [0] * len(rows)
    for part, counts in exact_parts(rows):
        assert 0 < sum(counts) <= 1 << 20
        blocks, rest = divmod(part, sum(counts))
        assert not rest
        drawn = [d + blocks * count for d, count in zip(drawn, counts, strict=True)]
    assert drawn == rows


def test_a_share_of_zero_takes_nothing_over() -> None:
    tree = expand({"web": F(1), "off": F(0)}, {})
    assert capacity(tree[1], {"web": 1, "off": 9}) == 0
    assert fill(tree, {"web": 5, "off": 9}, F(5)) == {"web": F(5), "off": F(0)}
