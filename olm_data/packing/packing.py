"""The packings there are, and the arithmetic of `concat`: rows are windows of one stream.

    row r of a source -> tokens [r*S, r*S + S]: S inputs and the one that follows, the last label

Neighbouring rows share one token, which is the last label of the first and the first input of the
second, so every token but the stream's first is a label exactly once. Pure arithmetic, no index.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

Rows = TypeVar("Rows", int, np.ndarray)

PLANNED = ("best_fit", "document")
"""Packings whose rows are lists of pieces (`row_plan.py`)."""

PACKINGS = ("concat", *PLANNED)


def rows_in(tokens: int, sequence_length: int) -> int:
    """Return how many whole rows a stream of `tokens` tokens has."""
    return max(0, (tokens - 1) // sequence_length)


def row_span(row: Rows, sequence_length: int) -> tuple[Rows, Rows]:
    """Return the token positions [start, stop) of a row, or of each of an array of rows.

    stop - start is sequence_length + 1.
    """
    start = row * sequence_length
    return start, start + sequence_length + 1


def unused_tail(tokens: int, sequence_length: int) -> int:
    """Return how many tokens at the stream's end stand in no row."""
    rows = rows_in(tokens, sequence_length)
    return tokens - (rows * sequence_length + 1) if rows else tokens


def rows_between(start_token: int, stop_token: int, sequence_length: int) -> int:
    """Return the rows of a stage that runs from token `start_token` to `stop_token` of the run.

    Boundaries are token counts from the run's beginning, each rounded down to a whole row, so the
    roundings of earlier stages never add up.
    """
    return stop_token // sequence_length - start_token // sequence_length
