"""The loss of a mixture by its shares, what that is worth, and the best mixture under caps.

Numbers are NumPy's, without a run or a file:

    shares, losses of held-out sets -> log loss by shares: three forms, ridge regression
                                    -> form and ridge of the least leave-one-out error -> Response
                                    -> the same with the losses shuffled: could it be chance?
                                    -> draws of the region, then closer ones -> the best
                                    -> points drawn again -> how often it beats another mixture

Forms: log loss linear in the shares (RegMix, arXiv 2407.01492); with products of pairs of them
(Scheffe, 1958, "Experiments with mixtures"); linear in logarithms of shares, as a source says most
with its first tokens. Of several held-out sets each has its own, as in the data mixing laws (Ye et
al., arXiv 2403.16952), and the mean of their losses has its best mixture inside the region.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from olm_train.extensions.ladder.law import Floats
from olm_train.extensions.ladder.simplex import DRAWS, Region

OFFSET = 0.02
"""Added to a share before its logarithm."""
RIDGES = np.geomspace(1e-5, 1e2, 8)
"""Penalties of a squared slope, by the number of points; columns have a variance of 1."""
SHUFFLES, RESAMPLES = 199, 400
CHANCE, SURE = 0.05, 0.95
"""Largest p-value that is not called chance; least probability that is called better."""
CLOSER = 6


def _pairs(shares: Floats) -> Floats:
    first, second = np.triu_indices(shares.shape[1], 1)
    return np.hstack([shares, shares[:, first] * shares[:, second]])


FORMS: dict[str, Callable[[Floats], Floats]] = {
    "shares": lambda shares: shares,
    "pairs of shares": _pairs,
    "logarithms of shares": lambda shares: np.log(shares + OFFSET),
}


class _Line(NamedTuple):
    """One held-out set's log loss: a form, its ridge, and the regression."""

    form: str
    ridge: float
    centre: Floats
    scale: Floats
    slope: Floats
    mean: float

    @classmethod
    def fit(cls, form: str, ridge: float, shares: Floats, logs: Floats) -> _Line:
        """Fit log losses [n] of mixtures [n, sources]."""
        x = FORMS[form](shares)
        centre, scale = x.mean(0), x.std(0)
        scale = np.where(scale > 1e-9, scale, 1)
        x = (x - centre) / scale
        gram = x.T @ x + ridge * len(x) * np.eye(x.shape[1])
        slope = np.linalg.solve(gram, x.T @ (logs - logs.mean()))
        return cls(form, ridge, centre, scale, slope, float(logs.mean()))

    def at(self, shares: Floats) -> Floats:
        """Return the log losses [n] of mixtures [n, sources]."""
        x = (FORMS[self.form](shares) - self.centre) / self.scale
        return np.asarray(x @ self.slope + self.mean)


def _left_out(shares: Floats, logs: Floats) -> tuple[list[tuple[str, float]], Floats]:
    """Return the kinds of fit, and of each the errors of points that were left out.

    The hat matrix gives them without another fit.

    Args:
        logs: [..., n].

    Returns:
        The kinds, and [kinds, ..., n].
    """
    kinds, errors, count = [], [], len(shares)
    for form, columns in FORMS.items():
        x = columns(shares)
        x = (x - x.mean(0)) / np.where(x.std(0) > 1e-9, x.std(0), 1)
        left, size, _ = np.linalg.svd(x, full_matrices=False)
        for ridge in RIDGES:
            hat = (left * (size**2 / (size**2 + ridge * count))) @ left.T + 1 / count
            errors.append((logs - logs @ hat) / (1 - np.diag(hat)))
            kinds.append((form, float(ridge)))
    return kinds, np.array(errors)


class Response(NamedTuple):
    """Losses of held-out sets by the shares of sources.

    Attributes:
        lines: of each held-out set.
        weights: of their losses in the mean, float64 [sets], sum 1.
    """

    lines: list[_Line]
    weights: Floats

    @classmethod
    def fit(cls, shares: Floats, losses: Floats, weights: Floats) -> Response:
        """Fit mixtures [n, sources] and their losses [n, sets]; form and ridge are chosen."""
        lines = []
        for logs in np.log(losses).T:
            kinds, errors = _left_out(shares, logs)
            form, ridge = kinds[int(np.sum(errors**2, axis=1).argmin())]
            lines.append(_Line.fit(form, ridge, shares, logs))
        return cls(lines, weights)

    def again(self, shares: Floats, losses: Floats) -> Response:
        """Return the fit of other points, of the same forms and ridges."""
        pairs = zip(self.lines, np.log(losses).T, strict=True)
        lines = [_Line.fit(line.form, line.ridge, shares, logs) for line, logs in pairs]
        return Response(lines, self.weights)

    def loss(self, shares: Floats) -> Floats:
        """Return the mean losses [n] of mixtures [n, sources]."""
        logs = np.stack([line.at(shares) for line in self.lines], axis=1)
        return np.asarray(np.exp(logs) @ self.weights)

    def best(self, region: Region, seed: int = 0) -> Floats:
        """Return the mixture [sources] of the lowest loss: of draws, then of draws around it."""
        random = np.random.default_rng(seed)
        found = np.vstack([region.baselines(), region.draws(4 * DRAWS, random)])
        found = found[self.loss(found).argmin()][None]
        for step in range(CLOSER):
            near = random.standard_normal((DRAWS, found.shape[1])) * 0.1 / 2**step
            near = region.within(np.abs(found + near))
            near = np.vstack([found, near])
            found = near[self.loss(near).argmin()][None]
        return np.asarray(found[0])


class Worth(NamedTuple):
    """What a fit is worth.

    Attributes:
        error: root mean square of the relative errors at points that were left out when form and
            slopes were chosen.
        explained: share of the variance that is explained there; at most 0: nothing is.
        chance: how often shuffled losses are explained as well: a p-value.
    """

    error: float
    explained: float
    chance: float


def worth(shares: Floats, losses: Floats, weights: Floats, seed: int = 0) -> Worth:
    """Judge fits of mixtures [n, sources] and their losses [n, sets]."""
    count, mean = len(shares), losses @ weights
    others = ~np.eye(count, dtype=bool)
    said = [Response.fit(shares[o], losses[o], weights).loss(shares[~o])[0] for o in others]
    wrong = np.array(said) - mean
    plain = mean - (mean.sum() - mean) / (count - 1)  # the error of the mean of the others
    random = np.random.default_rng(seed)
    orders = np.array([range(count), *(random.permutation(count) for _ in range(SHUFFLES))])
    found = np.zeros(orders.shape)
    for logs, weight in zip(np.log(losses).T, weights, strict=True):
        shuffled = logs[orders]
        _, errors = _left_out(shares, shuffled)
        least = np.sum(errors**2, axis=2).argmin(0)
        chosen = np.take_along_axis(errors, least[None, :, None], 0)[0]
        found += weight * (np.exp(shuffled) - np.exp(shuffled - chosen))
    squares = np.sum(found**2, axis=1)
    return Worth(
        error=float(np.sqrt(np.mean((wrong / mean) ** 2))),
        explained=float(1 - np.sum(wrong**2) / np.sum(plain**2)),
        chance=float(np.mean(squares <= squares[0])),
    )


def beats(
    response: Response, shares: Floats, losses: Floats, best: Floats, others: Floats, seed: int = 0
) -> Floats:
    """Return how often `best` [sources] has a lower loss than each of `others` [m, sources].

    Points are drawn again with replacement, and fitted.
    """
    random, wins = np.random.default_rng(seed), np.zeros(len(others))
    for _ in range(RESAMPLES):
        drawn = random.integers(len(shares), size=len(shares))
        said = response.again(shares[drawn], losses[drawn]).loss(np.vstack([best, others]))
        wins += said[0] < said[1:]
    return wins / RESAMPLES
