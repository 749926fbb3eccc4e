"""What a training run has logged: its starts, and the rows of each step.

    <run>/starts.jsonl    one line a start: where it went on, what it skips      (written from here)
    <run>/metrics.jsonl   one line a step, see docs/reference/train-config.md    (read only)

A start that goes on from a checkpoint removes the lines of later steps from metrics.jsonl, because
the weights of those steps are gone; how many it removed is in its line. So metrics.jsonl is always
the history of the weights, and starts.jsonl that of the machine. Never: compare anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.mixture.skip import Range, clip_ranges, merge_ranges

_T = TypeVar("_T")

STARTS, METRICS = "starts.jsonl", "metrics.jsonl"


class Start(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A start of a run, one line of `starts.jsonl`.

    Attributes:
        step: steps done before, by the checkpoint it went on from; 0 for a new run.
        rewound: logged steps beyond that, whose weights are lost and which are trained again.
        lock: digest of the mixture.
        global_batch_size: tokens of a step.
        world_size: ranks.
        skip: ranges of global rows left out, in the past and in the future of the run.
    """

    step: int
    rewound: int
    lock: str
    global_batch_size: int
    world_size: int
    skip: tuple[Range, ...]


class _Line(msgspec.Struct, frozen=True):
    """What is read of a line of `metrics.jsonl`; lines of evaluations have no rows."""

    step: int
    rows: Range | None = None
    skipped: tuple[Range, ...] = ()
    trained: float | None = msgspec.field(default=None, name="train/tokens")


@dataclass(frozen=True, slots=True)
class Step:
    """A logged step.

    Attributes:
        number: from 1.
        rows: half-open range of global rows.
        skipped: ranges inside `rows` that were left out.
        tokens: tokens the model was trained on, as counted on the devices; None if not logged.
    """

    number: int
    rows: Range
    skipped: tuple[Range, ...]
    tokens: int | None


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """The log of a run: its starts, at least one, and the steps its weights have seen."""

    folder: Path
    starts: list[Start]
    steps: list[Step]

    @classmethod
    def read(cls, folder: str | Path) -> RunLog:
        """Read the log of a run folder; a last line without its end is one being written.

        Raises:
            InputError: it has no log.
            ValidationError: a line is not what a run writes.
        """
        folder = Path(folder)
        starts = read_starts(folder)
        if not starts or not (folder / METRICS).is_file():
            missing = METRICS if starts else STARTS
            raise InputError(
                f"there is no log of a run here: {missing} is missing",
                where=str(folder),
                why="what was trained is known from the run's own log alone",
                fix="give the trainer.save_folder of a run whose "
                "trainer.callbacks.metric_saver was not switched off",
            )
        return cls(folder=folder, starts=starts, steps=_read_steps(folder / METRICS))


def read_starts(folder: Path) -> list[Start]:
    """Return the starts of a run, oldest first; none where there is no such file.

    Raises:
        ValidationError: a line is not what a run writes.
    """
    path = folder / STARTS
    if not path.is_file():
        return []
    return [
        _decoded(path, number, line, Start)
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1)
        if line.endswith(b"\n")
    ]


def encode_starts(starts: list[Start]) -> bytes:
    """Return the bytes of `starts.jsonl`."""
    return b"".join(msgspec.json.encode(start) + b"\n" for start in starts)


def _read_steps(path: Path) -> list[Step]:
    steps = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            entry = _decoded(path, number, line, _Line)
            if entry.rows is None:
                continue
            first, stop = entry.rows
            try:
                skipped = merge_ranges(entry.skipped) if entry.skipped else ()
            except UsageError as error:
                raise _malformed(path, number, error.what) from error
            if not 0 <= first < stop:
                raise _malformed(path, number, f"[{first}, {stop}] is not a range of rows")
            if skipped and clip_ranges(skipped, first, stop) != skipped:
                raise _malformed(path, number, "skipped rows are not among those of the step")
            tokens = None if entry.trained is None else int(entry.trained)
            steps.append(Step(entry.step, (first, stop), skipped, tokens))
    return steps


def _decoded(path: Path, number: int, line: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(path, number, str(error)) from error


def _malformed(path: Path, line: int, why: str) -> ValidationError:
    return ValidationError(
        "a line of a run's log is not what a run writes",
        where=f"{path}, line {line}",
        why=why,
        fix="restore the file from a copy",
    )
