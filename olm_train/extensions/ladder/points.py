"""The points of a ladder that were trained: a line of ladder.jsonl each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from olm_data.config.hints import PositiveFloat, PositiveInt
from olm_data.printing import Loss
from olm_data.run_log.lines import read_lines
from olm_train.extensions.ladder.law import Runs

RESULTS = "ladder.jsonl"


class Point(msgspec.Struct, frozen=True):
    """A run that has ended.

    Attributes:
        name: of its folder.
        digest: of its resolved configuration.
        parameters, tokens, flops: trained; of all steps, attention counted.
        lr, batch: peak rate; tokens of a step.
        loss: at its end: nats a token, of held-out text where the ladder names it.
    """

    name: str
    digest: str
    parameters: PositiveInt
    tokens: PositiveInt
    flops: PositiveFloat
    lr: float
    batch: int
    loss: Annotated[Loss, Meta(gt=0)]


def read_points(path: Path) -> list[Point]:
    """Return the points of a file, the last of each name; none where there is no such file.

    Raises:
        ValidationError: a line is no point.
    """
    return list({point.name: point for point in read_lines(path, Point)}.values())


def frontier(points: Sequence[Point]) -> list[Point]:
    """Return of each size and length the point of the lowest loss: its best rate and batch."""
    best: dict[tuple[int, int], Point] = {}
    for point in sorted(points, key=lambda point: point.loss):
        best.setdefault((point.parameters, point.tokens), point)
    return sorted(best.values(), key=lambda point: (point.parameters, point.tokens))


def as_runs(points: Sequence[Point]) -> Runs:
    """Return points as numbers to fit."""
    rows = [(point.parameters, point.tokens, point.loss) for point in points]
    return Runs(*np.array(rows, float).reshape(-1, 3).T)
