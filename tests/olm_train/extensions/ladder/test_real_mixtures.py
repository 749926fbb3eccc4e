"""A small mixture search that was trained once, on a CPU: its answer stays what it was.

Python's standard library, our pages, and random hexadecimal digits; judged by held-out code and
pages alike. 14 runs of 64 steps (width 32, 512 tokens, 131K tokens). What the mixtures then came to
with three other seeds: benchmarks/LOG.md.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from olm_data.run_log.lines import read_lines
from olm_train.extensions.ladder.best import said
from olm_train.extensions.ladder.mixture_law import Response, beats, worth
from olm_train.extensions.ladder.mixtures import MixedPoint
from olm_train.extensions.ladder.simplex import Region

SOURCES, SETS = ("code", "docs", "hex"), ("code", "docs")
POINTS = list(read_lines(Path(__file__).with_name("mixtures.jsonl"), MixedPoint))
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
