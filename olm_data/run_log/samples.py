"""Texts that a model wrote while it was trained: a line a step in `samples.jsonl`.

    write_samples --StepSamples--> <run>/samples.jsonl --> read_samples

A run that goes back, to a checkpoint or for a bad step, writes the lines of later steps anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from olm_data.bounded_json import Size
from olm_data.run_log.lines import read_lines, replace_file
from olm_data.run_log.log import Time

SAMPLES = "samples.jsonl"
MOST_SHOWN = 12
"""Steps whose texts a page shows."""


class WrittenText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text: `prompt`, what followed it, and why it ended ("non-finite": the logits were)."""

    prompt: str
    text: str
    finish: Literal["stop", "length", "non-finite"]


class StepSamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The texts after a step, one line of `samples.jsonl`.

    Attributes:
        step: steps done before.
        time: when the line was made.
        texts: one for each prompt, in their order.
        temperature, top_k, seed: how tokens were chosen.
    """

    step: Size
    time: Time = 0.0
    texts: tuple[WrittenText, ...]
    temperature: float
    top_k: int
    seed: int
    version: Literal[1] = 1


def read_samples(folder: Path, notes: list[str] | None = None) -> list[StepSamples]:
    """Return the texts of a run by step, ascending; none where there is no such file.

    Args:
        notes: takes a remark on a last line that is cut off.

    Raises:
        ValidationError: a line is not what a run writes.
    """
    return read_lines(folder / SAMPLES, StepSamples, notes)


def write_samples(folder: Path, samples: StepSamples) -> None:
    """Add the line of a step; lines of it and of later steps go."""
    _replace(folder, [*_before(folder, samples.step), samples])


def picked(samples: Sequence[StepSamples], most: int = MOST_SHOWN) -> list[StepSamples]:
    """Return those to look at: of the first and last steps, and of steps evenly between."""
    last = len(samples) - 1
    places = sorted({number * last // (most - 1) for number in range(most)}) if samples else []
    return [samples[place] for place in places]


def forget_samples(folder: Path, after: int) -> None:
    """Leave out the lines of steps after `after`: their weights are gone."""
    kept = _before(folder, after + 1)
    if len(kept) < len(read_samples(folder)):
        _replace(folder, kept)


def _before(folder: Path, step: int) -> list[StepSamples]:
    return [each for each in read_samples(folder) if each.step < step]


def _replace(folder: Path, samples: list[StepSamples]) -> None:
    replace_file(folder / SAMPLES, b"".join(msgspec.json.encode(s) + b"\n" for s in samples))
