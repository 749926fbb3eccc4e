"""The loss of a run by its size and its tokens: L(N, D) = E + A / N^alpha + B / D^beta.

Hoffmann et al. (2022), approach 3. Numbers are NumPy's, without a run or a file:

    points -> exhaustive alpha x beta grid: E, A, B of each by non-negative least squares
           -> refined in all five, Huber's loss by weights -> Law
           -> runs drawn again from its relative errors, each fitted -> laws, for bands

For given exponents the rest is linear (variable projection, Golub and Pereyra, 1973), so no start
value is asked for. Errors are relative: (predicted - loss) / loss.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

GRID = np.geomspace(0.03, 2.0, 43)
"""Exponents that are tried, for N and for D."""
HUBER = 1.345
"""Standard deviations from which an error counts by its size, not its square (Huber, 1981)."""
ROUNDING = 1e-9
"""Relative error of a loss below which nothing is told apart."""
REWEIGHTS, STEPS = 5, 16
"""How often errors are weighted anew; steps of the refinement each time."""


class Law(NamedTuple):
    """L(N, D) = E + A / N^alpha + B / D^beta; losses in nats a token."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float

    def loss(self, parameters: Floats | float, tokens: Floats | float) -> Floats:
        """Return the loss of runs of these sizes."""
        n, d = np.asarray(parameters, float), np.asarray(tokens, float)
        return self.E + self.A * n**-self.alpha + self.B * d**-self.beta

    @property
    def size_exponent(self) -> float:
        """The a of N ~ C^a, the size that makes the most of a compute."""
        return self.beta / (self.alpha + self.beta)


HOFFMANN = Law(1.69, 406.4, 0.34, 410.7, 0.28)
"""Hoffmann et al. (2022, arXiv 2203.15556), appendix D.3, as printed."""
EPOCH = Law(1.8172, 482.01, 0.3478, 2085.43, 0.3658)
"""Besiroglu et al. (2024, arXiv 2404.10102): the same runs, fitted to convergence."""


class Runs(NamedTuple):
    """What was trained: float64 [runs] each, above 0."""

    parameters: Floats
    tokens: Floats
    loss: Floats


def fit(runs: Runs) -> Law:
    """Return the law that describes runs best.

    Whether they determine it is for `fit.determined` to say: any five are fitted.
    """
    centre, size, length = _centred(runs)
    theta = _projected(size, length, runs.loss)
    found = _refined(theta[None], size, length, runs.loss[None])
    return _law(found[0], centre)


def resampled(runs: Runs, law: Law, draws: int, seed: int = 0) -> list[Law]:
    """Return the laws of as many ladders as could have been trained in place of this one.

    Their losses are the law's with relative errors of these runs, drawn with replacement. What a
    fit of five numbers takes from the errors is given back, and the scale drawn as uncertain as so
    few runs leave it (chi-squared): bands have the width of Student's t.

    Args:
        draws: how many.
        seed: of the draws.
    """
    centre, size, length = _centred(runs)
    predicted = law.loss(runs.parameters, runs.tokens)
    errors, free = runs.loss / predicted - 1, max(len(runs.loss) - 5, 1)
    random = np.random.default_rng(seed)
    drawn = random.choice(errors - errors.mean(), (draws, len(errors)))
    drawn *= np.sqrt(len(errors) / random.chisquare(free, (draws, 1)))
    losses = predicted * np.maximum(1 + drawn, 0.1)
    start = np.repeat(theta_of(law, centre)[None], draws, axis=0)
    found = _refined(start, size, length, losses)
    return [_law(theta, centre) for theta in found]


def band(draws: Floats) -> Floats:
    """Return the ends of the 90 % bands of numbers drawn: float64 [2, ...] of [draws, ...].

    The k-th of n draws in order is the quantile k / (n + 1): a number drawn like them is below it
    as often as that, however few they are.
    """
    found: Floats = np.quantile(draws, (0.05, 0.95), axis=0, method="weibull")
    return found


def _centred(runs: Runs) -> tuple[tuple[float, float], Floats, Floats]:
    """Return log N and log D about their means, and those."""
    size, length = np.log(runs.parameters), np.log(runs.tokens)
    centre = float(size.mean()), float(length.mean())
    return centre, size - centre[0], length - centre[1]


def _law(theta: Floats, centre: tuple[float, float]) -> Law:
    e, log_a, alpha, log_b, beta = map(float, theta)
    a, b = np.exp(log_a + alpha * centre[0]), np.exp(log_b + beta * centre[1])
    return Law(e, float(a), alpha, float(b), beta)


def theta_of(law: Law, centre: tuple[float, float]) -> Floats:
    """Return (E, log A, alpha, log B, beta), of logarithms about their means."""
    a, b = np.log(law.A) - law.alpha * centre[0], np.log(law.B) - law.beta * centre[1]
    return np.array([law.E, a, law.alpha, b, law.beta])


def _projected(size: Floats, length: Floats, loss: Floats) -> Floats:
    """Return the best (E, log A, alpha, log B, beta) of the grid."""
    by_size = np.exp(-GRID[:, None] * size)  # [a, runs]
    by_length = np.exp(-GRID[:, None] * length)  # [b, runs]
    shape = (len(GRID), len(GRID), len(loss))
    columns = [np.broadcast_to(np.ones_like(loss), shape), by_size[:, None], by_length[None]]
    design = np.stack([np.broadcast_to(c, shape) / loss for c in columns], axis=-1)
    linear, reduction = _non_negative(design.swapaxes(-1, -2) @ design, design.sum(axis=-2))
    at = np.unravel_index(np.argmax(reduction), reduction.shape)
    e, a, b = linear[at]
    least = np.finfo(float).tiny
    return np.array([e, np.log(max(a, least)), GRID[at[0]], np.log(max(b, least)), GRID[at[1]]])


def _non_negative(gram: Floats, right: Floats) -> tuple[Floats, Floats]:
    """Return the non-negative least squares of three columns: each subset of them is tried.

    Args:
        gram: float64 [..., 3, 3]. right: float64 [..., 3].

    Returns:
        The coefficients [..., 3], and by how much they reduce the squares [...].
    """
    best, most = np.zeros_like(right), np.zeros(right.shape[:-1])
    for kept in (list(s) for count in (3, 2, 1) for s in combinations(range(3), count)):
        part = gram[..., kept, :][..., kept]
        ridge = 1e-12 * np.einsum("...ii->...i", part)[..., None] * np.eye(len(kept))
        found = np.linalg.solve(part + ridge, right[..., kept][..., None])[..., 0]
        gain = np.sum(found * right[..., kept], axis=-1)
        better = (found >= 0).all(axis=-1) & (gain > most)
        whole = np.zeros_like(right)
        whole[..., kept] = found
        best, most = np.where(better[..., None], whole, best), np.where(better, gain, most)
    return best, most


def gradients(theta: Floats, size: Floats, length: Floats) -> tuple[Floats, Floats]:
    """Return losses [..., runs] and their slopes [..., runs, 5] by E, log A, alpha, log B, beta.

    Args:
        theta: float64 [..., 5].
        size, length: log N, log D: float64 [runs].
    """
    e, log_a, alpha, log_b, beta = (theta[..., k, None] for k in range(5))
    by_size, by_length = np.exp(log_a - alpha * size), np.exp(log_b - beta * length)
    parts = [np.ones_like(by_size), by_size, -by_size * size, by_length, -by_length * length]
    return e + by_size + by_length, np.stack(parts, axis=-1)


def _refined(theta: Floats, size: Floats, length: Floats, loss: Floats) -> Floats:
    """Return the parameters of least Huber loss near `theta`, for each row (Levenberg, Marquardt).

    Args:
        theta: float64 [rows, 5]. loss: float64 [rows, runs].
    """
    weight, spread = np.ones_like(loss), np.sqrt(loss.shape[1] / max(loss.shape[1] - 5, 1))
    for again in range(REWEIGHTS):
        if again:
            size_of = np.abs(gradients(theta, size, length)[0] / loss - 1)
            scale = 1.4826 * np.median(size_of, axis=1, keepdims=True) * spread
            known = HUBER * np.maximum(scale, ROUNDING)
            weight = known / np.maximum(size_of, known)
        theta = _least_squares(theta, size, length, loss, np.sqrt(weight))
    return theta


def _least_squares(
    theta: Floats, size: Floats, length: Floats, loss: Floats, root: Floats
) -> Floats:
    def errors(theta: Floats) -> tuple[Floats, Floats, Floats]:
        predicted, slopes = gradients(theta, size, length)
        wrong = root * (predicted / loss - 1)
        return wrong, (root / loss)[..., None] * slopes, np.sum(wrong**2, axis=1)

    damping = np.full(len(theta), 1e-3)
    wrong, slopes, cost = errors(theta)
    for _ in range(STEPS):
        square = slopes.swapaxes(-1, -2) @ slopes
        diagonal = np.einsum("...ii->...i", square)
        added = damping[:, None] * diagonal + 1e-15 * diagonal.max(axis=1, keepdims=True)
        right = np.einsum("...pk,...p->...k", slopes, wrong)
        step = np.linalg.solve(square + added[..., None] * np.eye(5), right[..., None])[..., 0]
        tried = theta - np.clip(step, -1, 1)
        tried[:, 0] = np.maximum(tried[:, 0], 0)
        tried[:, [2, 4]] = np.clip(tried[:, [2, 4]], GRID[0], GRID[-1])
        better = errors(tried)[2] < cost
        theta = np.where(better[:, None], tried, theta)
        damping = np.clip(np.where(better, damping / 5, damping * 4), 1e-12, 1e6)
        wrong, slopes, cost = errors(theta)
    return theta
