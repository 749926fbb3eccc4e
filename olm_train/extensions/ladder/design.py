"""Whether a ladder can tell its law, before anything is trained: Fisher's information of a design.

sizes, tokens, a law taken for true, noise of a loss -> standard errors of E, A, alpha, B, beta
                                                     -> what keeps the exponents together
                                                     -> the point to add (D-optimal by compute)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from olm_train.extensions.ladder.law import EPOCH, Floats, Law, gradients, theta_of

SEPARATED = 1.0
"""Relative standard error from which on an exponent is not told from 0."""


class Design(NamedTuple):
    """Runs to train: parameters and tokens, float64 [runs] each.

    Attributes:
        law: taken for true.
        noise: standard deviation of a loss, relative: of the seed of a run.
    """

    parameters: Floats
    tokens: Floats
    law: Law = EPOCH
    noise: float = 0.003

    def errors(self) -> dict[str, float]:
        """Return the standard errors of alpha and beta, relative; infinite: not determined."""
        spread = np.sqrt(np.diag(self.covariance()))
        return {
            "alpha": float(spread[2] / self.law.alpha),
            "beta": float(spread[4] / self.law.beta),
        }

    def problems(self) -> list[str]:
        """Return why this design cannot separate the exponents; none where it can."""
        if max(self.errors().values()) < SEPARATED:
            return []
        ratio = self.tokens / self.parameters
        why = []
        if np.ptp(np.log(self.tokens)) < 0.1:
            why.append("all runs have the same tokens: B / D^beta is one number with E")
        if np.ptp(np.log(self.parameters)) < 0.1:
            why.append("all runs have the same size: A / N^alpha is one number with E")
        if np.ptp(np.log(ratio)) < 0.1:
            why.append(
                "all runs have the same tokens for each parameter: A / N^alpha and B / D^beta "
                "fall together"
            )
        found = ", ".join(
            f"{name} +-{error:.0%}" if np.isfinite(error) else f"{name} not at all"
            for name, error in self.errors().items()
        )
        return why or [f"{len(self.parameters)} runs determine {found}"]

    def with_run(self, parameters: float, tokens: float) -> Design:
        """Return the design with a run more."""
        sizes, lengths = np.append(self.parameters, parameters), np.append(self.tokens, tokens)
        return self._replace(parameters=sizes, tokens=lengths)

    def information(self) -> float:
        """Return the log determinant of the information, of a design that may be singular."""
        slopes = self.slopes(self.parameters, self.tokens)
        square = slopes.T @ slopes / self.noise**2
        return float(np.linalg.slogdet(square + 1e-6 * np.eye(5))[1])

    def cheapest(self, candidates: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
        """Return the candidate (parameters, tokens) to add; None: no one is new.

        Of those that separate the exponents the one of least compute; where none does, or all do,
        the one that adds most information and is no dearer than the dearest run.
        """
        mine = set(zip(self.parameters, self.tokens, strict=True))
        new = [one for one in candidates if one not in mine]
        if not new:
            return None
        separating = [one for one in new if self.problems() and not self.with_run(*one).problems()]
        if separating:
            return min(separating, key=lambda one: one[0] * one[1])
        most = float(np.max(self.parameters * self.tokens))
        payable = [one for one in new if one[0] * one[1] <= most] or new
        return max(payable, key=lambda one: self.with_run(*one).information())

    def slopes(self, parameters: Floats, tokens: Floats) -> Floats:
        """Return the slopes of the logarithms of losses, by the parameters: [runs, 5]."""
        centre = np.log(self.parameters).mean(), np.log(self.tokens).mean()
        size, length = np.log(parameters) - centre[0], np.log(tokens) - centre[1]
        predicted, slopes = gradients(theta_of(self.law, centre), size, length)
        return slopes / predicted[:, None]

    def covariance(self) -> Floats:
        """Return the covariance of (E, log A, alpha, log B, beta) about the mean of the runs."""
        slopes = self.slopes(self.parameters, self.tokens)
        scale = np.linalg.norm(slopes, axis=0)
        if not scale.all():
            return np.full((5, 5), np.inf)
        values, vectors = np.linalg.eigh((slopes / scale).T @ (slopes / scale))
        if values[0] <= 1e-13 * values[-1]:
            return np.full((5, 5), np.inf)
        inverse = (vectors / values) @ vectors.T
        return self.noise**2 * inverse / np.outer(scale, scale)
