"""The points of a ladder that were trained: a line of ladder.jsonl each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from olm_data.errors import InputError
from olm_data.printing import Loss
from olm_data.regular_files import read_regular
from olm_train.extensions.ladder.law import Runs

RESULTS = "ladder.jsonl"
MAX_RESULTS = 1 << 26


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
    parameters: int
    tokens: int
    flops: float
    lr: float
    batch: int
    loss: Loss


def read_points(path: Path) -> list[Point]:
    """Return the points of a file, the last of each name.

    Raises:
        InputError: there is no such file, or a line is no point.
    """
    try:
        text = read_regular(path, MAX_RESULTS)
    except FileNotFoundError as error:
        raise InputError(
            "nothing of this ladder was trained", where=path, fix="olm-train ladder run"
        ) from error
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            point = msgspec.json.decode(line, type=Point)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InputError(f"no point of a ladder: {error}", where=f"{path}:{number}") from error
        if not (min(point.parameters, point.tokens) > 0 and 0 < point.loss < float("inf")):
            raise InputError("size, tokens and loss are above 0", where=f"{path}:{number}")
        found[point.name] = point
    return list(found.values())


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
