"""The answer of a mixture search: a manifest, and a sentence that says how sure it is.

mixtures.jsonl -> Response, its worth -> best mixture, how often it beats the baselines
               -> FOLDER/best.yaml, for olm-data mix
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from olm_data.errors import InputError
from olm_data.printing import Columns, Loss, Share
from olm_data.run_log.lines import replace_file
from olm_train.extensions.ladder.mixture_law import CHANCE, SURE, Response, Worth, beats, worth
from olm_train.extensions.ladder.mixtures import RESULTS, Search

BEST = "best.yaml"
BASELINES = ("natural", "uniform")


class SourceShare(msgspec.Struct, frozen=True):
    """The share of a source.

    Attributes:
        epochs: how often its rows are drawn in the target run.
    """

    source: str
    best: Share
    natural: Share
    uniform: Share
    epochs: float


class Rival(msgspec.Struct, frozen=True):
    """A mixture, and how often the best one has a lower loss where the points are drawn again."""

    mixture: str
    loss: Loss
    beaten: Share


class Answer(msgspec.Struct, frozen=True):
    """What a search found.

    Attributes:
        leave_one_out_error: root mean square of the relative errors of the mean loss.
        explained: share of its variance that is explained at points left out.
        chance: p-value of that: how often shuffled losses are explained as well.
        forms: of the losses of the held-out sets.
        loss: of the best mixture, by the fit.
        verdict: how sure it is.
        manifest: of the best mixture; the natural one's where the losses are not explained.
    """

    COLUMNS: ClassVar = {"shares": Columns(("source", "best", "natural", "uniform", "epochs"))}

    leave_one_out_error: Share
    explained: Share
    chance: float
    points: int
    forms: dict[str, str]
    loss: Loss
    verdict: str
    manifest: str
    shares: list[SourceShare]
    rivals: list[Rival]


def answer(search: Search) -> Answer:
    """Fit the trained points of a search, and write the manifest of the best mixture.

    Raises:
        InputError: too few are trained.
    """
    points, folder = search.done(), Path(search.config.folder)
    if len(points) < len(search.names) + 3:
        raise InputError(
            f"{len(points)} trained mixtures do not tell what {len(search.names)} shares do",
            where=str(folder / RESULTS),
            fix="train the others: olm-train ladder mix mix-search.yaml",
        )
    weights = np.array([*search.weights.values()])
    shares = np.array([search.array(point.shares) for point in points])
    losses = np.array([[point.losses[name] for name in search.weights] for point in points])
    response, judged = Response.fit(shares, losses, weights), worth(shares, losses, weights)
    rivals = search.region.baselines()
    told = judged.chance <= CHANCE
    best = response.best(search.region) if told else rivals[0]
    beaten = beats(response, shares, losses, best, rivals)
    verdict = said(judged, best, rivals, beaten)
    epochs = best * search.config.target / search.available
    path = folder / BEST
    text = f"# {verdict}\n".encode() + search.manifest(search.named(best), search.config.target)
    replace_file(path, text)
    return Answer(
        leave_one_out_error=judged.error,
        explained=judged.explained,
        chance=judged.chance,
        points=len(points),
        forms={n: line.form for n, line in zip(search.weights, response.lines, strict=True)},
        loss=float(response.loss(best[None])[0]),
        verdict=verdict,
        manifest=str(path),
        shares=[
            SourceShare(name, *map(float, numbers))
            for name, *numbers in zip(search.names, best, *rivals, epochs, strict=True)
        ],
        rivals=[
            Rival(name, float(loss), float(won))
            for name, loss, won in zip(BASELINES, response.loss(rivals), beaten, strict=True)
        ],
    )


def said(judged: Worth, best: np.ndarray, rivals: np.ndarray, beaten: np.ndarray) -> str:
    """Return how sure a search is of its best mixture, in a sentence.

    Args:
        best: float64 [sources].
        rivals: float64 [2, sources], the baselines.
        beaten: float64 [2], see `beats`.
    """
    if judged.chance > CHANCE:
        return (
            "No mixture is distinguishable from another: shuffled losses are explained as well in "
            f"{judged.chance:.0%} of cases; this is the natural mixture."
        )
    words = []
    for name, rival, share in zip(BASELINES, rivals, beaten, strict=True):
        if np.array_equal(best, rival):
            words.append(f"is the {name} one")
        elif share >= SURE:
            sure = "over 0.99" if share > 0.99 else f"{share:.2f}"
            words.append(f"beats the {name} one with probability {sure}")
        else:
            words.append(f"is not distinguishable from the {name} one ({share:.2f})")
    return f"This mixture {' and '.join(words)}, by runs of the search's length."
