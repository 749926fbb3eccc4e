"""What a training run has logged: its starts, and the rows of each step.

    <run>/starts.jsonl    one line a start: where it went on, what it skips      (written from here)
    <run>/metrics.jsonl   one line a step, see olm_data/locate/run.py            (read only)

A start that goes on from a checkpoint removes the lines of later steps from metrics.jsonl, because
the weights of those steps are gone; how many it removed is in its line. So metrics.jsonl is always
the history of the weights, and starts.jsonl that of the machine. Never: compare anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from olm_data.bounded_json import MalformedJson, Size, decode
from olm_data.errors import InputError
from olm_data.json_lines import LogEnd, malformed_log, raw_lines
from olm_data.locate.run import LOG, LoggedStep, read_steps
from olm_data.order.skip import Range
from olm_data.order.steps import StepSizes

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
        bad: rows of a step with a non-finite loss or gradient. The run went back to this start
            to leave them out; they are among `skip`.
        time: seconds since 1970, UTC; 0.0 in logs without.
        command: what was typed, credentials left out; "" in logs without.
        device: name of the device of rank 0; "" in logs without.
        parameters: of the model; 0 in logs without.
        config: resolved configuration, as in config.json; empty in logs without.
        changes: fields of it that differ from those of the checkpoint it went on from, one line
            each, `a.b: old -> new`.
    """

    step: Size
    rewound: Size
    lock: str
    global_batch_size: Size
    world_size: Size
    skip: tuple[Range, ...]
    bad: tuple[Range, ...] = ()
    batch_size_changes: tuple[tuple[int, int], ...] = ()
    time: float = 0.0
    command: str = ""
    device: str = ""
    parameters: int = 0
    config: dict[str, Any] = {}  # msgspec gives each its own
    changes: tuple[str, ...] = ()

    @property
    def batch_sizes(self) -> StepSizes:
        """Tokens of each step."""
        return StepSizes.recorded(self.global_batch_size, self.batch_size_changes)


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """The log of a run: its starts, at least one, and the steps its weights have seen.

    `notes` says what of the files was left out.
    """

    folder: Path
    starts: list[Start]
    steps: list[LoggedStep]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: str | Path) -> RunLog:
        """Read the log of a run folder; a last line without its end is one being written.

        Raises:
            InputError: it has no log.
            ValidationError: a line is not what a run writes.
        """
        folder = Path(folder)
        ends = LogEnd(), LogEnd()
        starts = read_starts(folder, ends[0])
        if not starts or not (folder / LOG).is_file():
            missing = LOG if starts else STARTS
            raise InputError(
                f"there is no log of a run here: {missing} is missing",
                where=str(folder),
                why="what was trained is known from the run's own log alone",
                fix="give the trainer.save_folder of a run whose "
                "trainer.callbacks.metric_saver was not switched off",
            )
        steps = list(read_steps(folder / LOG, ends[1]))
        notes = [*ends[0].note(folder / STARTS), *ends[1].note(folder / LOG)]
        return cls(folder=folder, starts=starts, steps=steps, notes=notes)


def read_starts(folder: Path, end: LogEnd | None = None) -> list[Start]:
    """Return the starts of a run, oldest first; none where there is no such file.

    Raises:
        ValidationError: a line is not what a run writes.
    """
    path = folder / STARTS
    if not path.is_file():
        return []
    starts = []
    for number, line in raw_lines(path, end):
        try:
            starts.append(decode(line, Start))
        except MalformedJson as error:
            raise malformed_log(path, f"line {number}: {error}") from None
    return starts


def encode_starts(starts: list[Start]) -> bytes:
    """Return the bytes of `starts.jsonl`."""
    return b"".join(msgspec.json.encode(start) + b"\n" for start in starts)
