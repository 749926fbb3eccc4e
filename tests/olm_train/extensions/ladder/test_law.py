"""The law of a ladder: published constants come back, and bands hold what they promise."""

import numpy as np
import pytest

from olm_train.extensions.ladder.law import EPOCH, HOFFMANN, Law, Runs, band, fit, resampled

SIZES = np.repeat([20e6, 60e6, 190e6, 600e6], 3)
TOKENS = SIZES * np.tile([5, 20, 80], 4)
TARGET = (7e9, 140e9)


def runs_of(law: Law, noise: float = 0.0, seed: int = 0) -> Runs:
    wrong = noise * np.random.default_rng(seed).standard_normal(len(SIZES))
    return Runs(SIZES, TOKENS, law.loss(SIZES, TOKENS) * (1 + wrong))


@pytest.mark.parametrize("law", [HOFFMANN, EPOCH])
def test_a_published_law_comes_back_from_losses_without_noise(law: Law) -> None:
    assert fit(runs_of(law)) == pytest.approx(law, rel=1e-4)


def test_the_order_of_the_runs_and_the_unit_of_tokens_do_not_matter() -> None:
    runs = runs_of(EPOCH, 0.003)
    law = fit(runs)
    order = np.random.default_rng(1).permutation(len(SIZES))
    shuffled = fit(Runs(*(column[order] for column in runs)))
    assert shuffled == pytest.approx(law, rel=1e-6)
    billions = fit(runs._replace(tokens=TOKENS / 1e9))
    assert billions.alpha == pytest.approx(law.alpha, rel=1e-6)
    assert pytest.approx(law.B / 1e9**law.beta, rel=1e-5) == billions.B


def test_one_diverged_run_moves_the_forecast_little() -> None:
    runs = runs_of(EPOCH, 0.001)
    clean = fit(runs).loss(*TARGET)
    runs.loss[4] *= 1.1
    assert fit(runs).loss(*TARGET) == pytest.approx(clean, rel=0.02)


def test_a_loss_that_tokens_alone_decide_has_no_term_of_the_size() -> None:
    law = Law(1.0, 0.0, 0.3, 200.0, 0.3)
    found = fit(runs_of(law))
    assert found.loss(SIZES, TOKENS) == pytest.approx(law.loss(SIZES, TOKENS), rel=1e-5)


@pytest.mark.parametrize("law", [HOFFMANN, EPOCH])
def test_exponents_come_back_within_a_tenth_and_bands_cover(law: Law) -> None:
    ladders = 50
    alphas, covered = [], []
    for seed in range(ladders):
        runs = runs_of(law, 0.003, seed)
        found = fit(runs)
        laws = np.array(resampled(runs, found, 60, seed))
        low, high = band(laws)
        far = [float(Law(*each).loss(*TARGET)) for each in laws]
        ends = band(np.array(far))
        alphas.append(found.alpha / law.alpha - 1)
        covered.append(
            [
                low[2] < law.alpha < high[2],
                low[4] < law.beta < high[4],
                ends[0] < law.loss(*TARGET) < ends[1],
            ]
        )
    assert np.mean(np.abs(alphas) < 0.1) >= 0.9
    assert abs(np.mean(alphas)) < 0.02
    shares = np.mean(covered, axis=0)
    assert ((shares > 0.8) & (shares < 0.98)).all(), shares


def test_a_number_drawn_like_few_others_is_in_their_band_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).standard_normal((60, 20_000))
    low, high = band(draws[:-1])
    inside = np.mean((low < draws[-1]) & (draws[-1] < high))
    assert inside == pytest.approx(0.9, abs=0.006)  # as plain quantiles: 0.87


def test_scipy_finds_no_better_law() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    runs = runs_of(EPOCH, 0.003, 7)
    n, d = np.log(SIZES / SIZES.mean()), np.log(TOKENS / TOKENS.mean())

    def errors(theta: np.ndarray) -> np.ndarray:
        e, a, alpha, b, beta = theta
        return (e + np.exp(a - alpha * n) + np.exp(b - beta * d)) / runs.loss - 1

    def cost(found: Law) -> float:
        return float(np.abs(found.loss(SIZES, TOKENS) / runs.loss - 1).sum())

    theirs = optimize.least_squares(errors, [1, 0, 0.3, 0, 0.3], loss="huber", f_scale=0.002).x
    law = Law(
        theirs[0],
        np.exp(theirs[1]) * SIZES.mean() ** theirs[2],
        theirs[2],
        np.exp(theirs[3]) * TOKENS.mean() ** theirs[4],
        theirs[4],
    )
    assert cost(fit(runs)) < 1.05 * cost(law)
    assert fit(runs).alpha == pytest.approx(law.alpha, rel=0.05)
