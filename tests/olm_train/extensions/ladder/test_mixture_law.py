"""A mixture search, on laws that are known and on runs that were trained: what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olm_data.run_log.lines import read_lines
from olm_train.extensions.ladder.best import said
from olm_train.extensions.ladder.law import Floats
from olm_train.extensions.ladder.mixture_law import (
    FORMS,
    RIDGES,
    Response,
    _left_out,
    beats,
    worth,
)
from olm_train.extensions.ladder.mixtures import MixedPoint
from olm_train.extensions.ladder.simplex import PARTS, Region

NATURAL = np.array([0.7, 0.2, 0.1])


FREE = Region(NATURAL, np.zeros(3), np.ones(3))


BOTH = np.array([0.5, 0.5])


def mixing(shares: Floats) -> Floats:
    """A data mixing law of two held-out sets, which want other sources; best: 0.42, 0, 0.58."""
    slopes = np.array([[-1.5, -0.2, 0.1], [0.2, -0.3, -2.0]])
    losses: Floats = np.array([2.0, 1.5]) + np.array([1.0, 1.2]) * np.exp(shares @ slopes.T)
    return losses


def searched(losses: Floats, points: Floats, region: Region = FREE) -> tuple[Floats, str]:
    weights = np.full(losses.shape[1], 1 / losses.shape[1])
    response = Response.fit(points, losses, weights)
    best, rivals = response.best(region), region.baselines()
    beaten = beats(response, points, losses, best, rivals)
    return best, said(worth(points, losses, weights), best, rivals, beaten)


@st.composite
def regions(draw: st.DrawFn) -> Region:
    count = draw(st.integers(2, 6))
    parts = st.lists(st.integers(0, PARTS), min_size=count, max_size=count)
    natural = np.array(draw(parts)) + 1.0
    inside = np.array(draw(parts)) + 1.0
    inside = np.floor(inside / inside.sum() * PARTS) / PARTS
    inside[0] += 1 - inside.sum()
    low = np.maximum(inside - np.array(draw(parts)) / PARTS, 0)
    high = np.minimum(inside + np.array(draw(parts)) / PARTS, 1)
    return Region(natural / natural.sum(), low, high)


@settings(max_examples=40)
@given(regions(), st.integers(0, 9))
def test_points_are_mixtures_within_the_bounds(region: Region, seed: int) -> None:
    points = region.spread(region.baselines(), 12, seed)
    assert np.allclose(points.sum(1), 1, atol=1e-9)
    assert (points >= region.low - 1e-9).all()
    assert (points <= region.high + 1e-9).all()
    assert np.allclose(points * PARTS, np.round(points * PARTS), atol=1e-9)
    assert np.array_equal(points, region.spread(region.baselines(), 12, seed))


def test_points_that_are_there_stay_and_others_keep_away_from_them() -> None:
    first = FREE.spread(FREE.baselines(), 10, 0)
    more = FREE.spread(first, 16, 0)
    assert np.array_equal(more[:10], first)
    apart = np.linalg.norm(more[:, None] - more[None], axis=-1) + np.eye(16)
    assert apart.min() > 0.1


def test_a_new_source_has_no_share_in_the_old_points_and_some_in_the_new() -> None:
    old = np.pad(FREE.spread(FREE.baselines(), 10, 0), ((0, 0), (0, 1)))
    wider = Region(np.array([0.5, 0.2, 0.1, 0.2]), np.zeros(4), np.ones(4))
    new = wider.spread(np.vstack([wider.baselines(), old]), 18, 0)[12:]
    assert (new[:, 3] > 0).sum() >= 5


@pytest.mark.parametrize("form", FORMS)
def test_errors_of_points_left_out_are_those_of_fits_without_them(form: str) -> None:
    points = FREE.spread(FREE.baselines(), 12, 0)
    logs = np.log(mixing(points))[:, 0] + 0.01 * np.random.default_rng(0).standard_normal(12)
    kinds, errors = _left_out(points, logs)
    for ridge in RIDGES:
        x = FORMS[form](points)
        x = (x - x.mean(0)) / x.std(0)
        for place in range(12):
            kept = np.arange(12) != place
            here = np.column_stack([np.ones(11), x[kept]])
            penalty = ridge * 12 * np.diag([0.0, *np.ones(x.shape[1])])
            found = np.linalg.solve(here.T @ here + penalty, here.T @ logs[kept])
            wrong = logs[place] - np.array([1.0, *x[place]]) @ found
            assert errors[kinds.index((form, ridge))][place] == pytest.approx(wrong, abs=1e-7)


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.01])
def test_the_best_mixture_of_a_known_law_is_found(noise: float) -> None:
    points = FREE.spread(FREE.baselines(), 20, 0)
    for seed in range(3):
        random = np.random.default_rng(seed)
        best, verdict = searched(
            mixing(points) * (1 + noise * random.standard_normal((20, 1))), points
        )
        lowest = (mixing(FREE.draws(20_000, random)) @ BOTH).min()
        assert mixing(best) @ BOTH < lowest * 1.001
        assert best == pytest.approx([0.42, 0.0, 0.58], abs=0.04)
        assert "beats the natural one" in verdict


def test_the_best_mixture_keeps_the_caps() -> None:
    capped = Region(NATURAL, np.array([0.0, 0.1, 0.0]), np.array([1.0, 1.0, 0.3]))
    points = capped.spread(capped.baselines(), 20, 0)
    best, _ = searched(mixing(points), points, capped)
    assert best == pytest.approx([0.6, 0.1, 0.3], abs=0.01)


def test_noise_is_called_noise() -> None:
    """At 5 % significance: of 30 searches among equals, one or two may say otherwise."""
    points = FREE.spread(FREE.baselines(), 16, 0)
    told = 0
    for seed in range(30):
        random = np.random.default_rng(seed)
        losses = 3 * (1 + 0.01 * random.standard_normal((16, 1)))
        told += "beats" in searched(losses, points)[1]
    assert told <= 4


def test_an_equal_mixture_is_not_called_better() -> None:
    """The law's best mixture is the uniform one."""
    points = FREE.spread(FREE.baselines(), 20, 0)
    law = 2 + 0.5 / (points + 0.03) ** 0.3
    for seed in range(3):
        losses = law * (1 + 0.005 * np.random.default_rng(seed).standard_normal((20, 1)))
        verdict = searched(losses, points)[1]
        assert "beats the natural one" in verdict
        assert "beats the uniform one" not in verdict


SOURCES, SETS = ("code", "docs", "hex"), ("code", "docs")


POINTS = list(read_lines(Path(__file__).with_name("mixtures.jsonl"), MixedPoint))
"""Trained once, on a CPU: 14 runs of 64 steps (width 32, 512 tokens, 131K tokens) on Python's
standard library, our pages, and random hexadecimal digits; judged by held-out code and pages alike.
What the mixtures then came to with three other seeds: benchmarks/LOG.md."""


SHARES = np.array([[point.shares.get(name, 0.0) for name in SOURCES] for point in POINTS])


LOSSES = np.array([[point.losses[name] for name in SETS] for point in POINTS])


WEIGHTS = np.array([0.5, 0.5])


REGION = Region(SHARES[0], np.zeros(3), np.array([1.0, 0.734, 1.0]))


def test_the_fit_is_what_it_was() -> None:
    judged = worth(SHARES, LOSSES, WEIGHTS)
    assert judged.error == pytest.approx(0.0451, abs=0.002)
    assert judged.explained == pytest.approx(0.662, abs=0.02)
    assert judged.chance < 0.02


def test_the_best_mixture_leaves_noise_out_and_says_how_sure_it_is() -> None:
    response = Response.fit(SHARES, LOSSES, WEIGHTS)
    assert [line.form for line in response.lines] == ["shares", "logarithms of shares"]
    best, rivals = response.best(REGION), SHARES[:2]
    assert best == pytest.approx([0.81, 0.19, 0.0], abs=0.03)
    verdict = said(
        worth(SHARES, LOSSES, WEIGHTS), best, rivals, beats(response, SHARES, LOSSES, best, rivals)
    )
    assert verdict.count("beats") == 2


def test_losses_dealt_to_other_mixtures_give_no_answer() -> None:
    told = []
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(len(LOSSES))
        told.append(worth(SHARES, LOSSES[order], WEIGHTS).chance <= 0.05)
    assert sum(told) <= 2
