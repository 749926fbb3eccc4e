"""What a training run has logged: its starts, and the rows of each step.

    <run>/starts.jsonl    one line a start: where it went on, what it skips      (written from here)
    <run>/metrics.jsonl   one line a step, see olm_data/locate/run.py            (read only)

A start that goes on from a checkpoint removes the lines of later steps from metrics.jsonl, because
the weights of those steps are gone; how many it removed is in its line. So metrics.jsonl is always
the history of the weights, and starts.jsonl that of the machine. Never: compare anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from olm_data.errors import InputError, ValidationError
from olm_data.locate.run import LOG, LoggedStep, read_steps
from olm_data.mixture.skip import Range
from olm_data.mixture.steps import StepSizes

STARTS = "starts.jsonl"


class Start(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A start of a run, one line of `starts.jsonl`.

    Attributes:
        step: steps done before, by the checkpoint it went on from; 0 for a new run.
        rewound: logged steps beyond that, whose weights are lost and which are trained again.
        lock: digest of the mixture.
        global_batch_size: tokens of a step, of the first one where the size changes.
        batch_size_changes: later sizes: (first step, counted from 1, tokens).
        world_size: ranks.
        skip: ranges of global rows left out, in the past and in the future of the run.
        bad: rows of a step whose loss or gradient was no number. The run went back to this start
            to leave them out; they are among `skip`.
    """

    step: int
    rewound: int
    lock: str
    global_batch_size: int
    world_size: int
    skip: tuple[Range, ...]
    bad: tuple[Range, ...] = ()
    batch_size_changes: tuple[tuple[int, int], ...] = ()

    @property
    def batch_sizes(self) -> StepSizes:
        """Tokens of each step."""
        return StepSizes.recorded(self.global_batch_size, self.batch_size_changes)


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """The log of a run: its starts, at least one, and the steps its weights have seen."""

    folder: Path
    starts: list[Start]
    steps: list[LoggedStep]

    @classmethod
    def read(cls, folder: str | Path) -> RunLog:
        """Read the log of a run folder; a last line without its end is one being written.

        Raises:
            InputError: it has no log.
            ValidationError: a line is not what a run writes.
        """
        folder = Path(folder)
        starts = read_starts(folder)
        if not starts or not (folder / LOG).is_file():
            missing = LOG if starts else STARTS
            raise InputError(
                f"there is no log of a run here: {missing} is missing",
                where=str(folder),
                why="what was trained is known from the run's own log alone",
                fix="give the trainer.save_folder of a run whose "
                "trainer.callbacks.metric_saver was not switched off",
            )
        return cls(folder=folder, starts=starts, steps=list(read_steps(folder / LOG)))


def read_starts(folder: Path) -> list[Start]:
    """Return the starts of a run, oldest first; none where there is no such file.

    Raises:
        ValidationError: a line is not what a run writes.
    """
    path = folder / STARTS
    if not path.is_file():
        return []
    starts = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if line.endswith(b"\n"):
            try:
                starts.append(msgspec.json.decode(line, type=Start))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ValidationError(
                    "a file of the run is malformed",
                    where=str(path),
                    why=f"line {number}: {error}",
                    fix="restore it from a copy",
                ) from error
    return starts


def encode_starts(starts: list[Start]) -> bytes:
    """Return the bytes of `starts.jsonl`."""
    return b"".join(msgspec.json.encode(start) + b"\n" for start in starts)
