"""The log of a run: a line for each step, evaluation and start. Read and written here only.

    MetricsWriter --Step, Evaluation--> <run>/metrics.jsonl --> read_metrics --.
    append_start  --Start-------------> <run>/starts.jsonl  --> read_starts ---+--> RunLog, notes

    {"step": 12, "time": 1767225600.125, "tokens": 6144, "rows": [88, 96], "order": "9f2c...",
     "train/CE loss": 5.1, ...}
    {"step": 12, "time": 1767225601.5, "eval": {"web": {"CE loss": 5.2, "PPL": 181.3, ...}}}

A start that goes on from a checkpoint removes the lines of later steps from `metrics.jsonl`: the
weights of those steps are gone. How many it removed is in its own line. So `metrics.jsonl` is the
history of the weights, each step in it once, and `starts.jsonl` that of the machine.

Numbers are written so that reading them gives the same float64 back; NaN and infinity are null. A
line without `version` has version 1; a step of data from no mixture lock has version 2, no rows and
no order. A last line without its end was being written when the machine failed: it is left out, and
`notes` say so, as they do of lines that are missing or stand twice.

What the log of a run lacks: lines of steps that are missing or stand twice, a missing file.

    numbers of the logged steps, steps that starts went on from -> remarks

A log begins after the earliest step that a start went on from.

Also: how each start of a run ended: a line each in `ends.jsonl`. Read and written here only.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from olm_data.bounded_json import MAX_DIGITS, JsonObject, MalformedJson, Size, decode, decode_object
from olm_data.decoding import convert, decoder
from olm_data.errors import UsageError, printable
from olm_data.order.steps import Range, StepSizes, clip_ranges, merge_ranges
from olm_data.run_log.lines import append_line, lines, malformed_log, read_lines, replace_file
from olm_data.run_log.metric_names import STEP_SKIPPED, TOKENS
from olm_data.storage.disk import io_errors
from olm_data.storage.store import Store

METRICS, STARTS = "metrics.jsonl", "starts.jsonl"
COUNTED = (TOKENS, STEP_SKIPPED)
"""Metrics that say what became of the rows of a step."""

Time = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
"""Seconds since 1970, UTC; 0.0 in logs without."""
Values = dict[str, float | None]
"""Metrics by name; None is what was NaN or infinite."""


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step, one line of `metrics.jsonl`.

    Attributes:
        step: its number, from 1.
        time: when the line was made.
        tokens: tokens trained on so far; 0 where the data loader counts no tokens.
        rows: half-open range of global rows; (0, 0) without a lock.
        epoch: pass over data that come from no lock, from 1.
        skipped: ranges inside `rows` that were left out, sorted and merged.
        order: digest of the rows, see `olm_data.order.steps`; None in logs without.
        metrics: by name; in the file they stand beside the fields above.
        line: line of the file, from 1; not written.
    """

    step: Size
    time: Time = 0.0
    tokens: Size = 0
    rows: tuple[Size, Size] = (0, 0)
    epoch: Size = 1
    skipped: tuple[Range, ...] = ()
    order: str | None = None
    metrics: Values = {}  # msgspec gives each its own
    version: Literal[1, 2] = 1
    line: int = 0

    def __post_init__(self) -> None:
        locked = self.rows[0] < self.rows[1] and self.epoch == 1
        if not (locked if self.version == 1 else self.rows == (0, 0) and self.order is None):
            raise ValueError("step, tokens and rows are not what a run writes")
        if self.skipped and clip_ranges(merge_ranges(self.skipped), *self.rows) != self.skipped:
            raise ValueError("skipped rows are not among those of the step")

    @property
    def trained(self) -> int | None:
        """Tokens of the step as counted on the devices, None in logs without."""
        count = self.metrics.get(TOKENS)
        return None if count is None else int(count)

    @property
    def taken(self) -> bool:
        """Whether the weights moved: a spike, or a non-finite loss, may be left out."""
        return not self.metrics.get(STEP_SKIPPED)


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An evaluation, one line of `metrics.jsonl`.

    Attributes:
        step: steps done before it.
        time: when the line was made.
        results: metrics of each held-out dataset by its name.
    """

    step: Size
    time: Time = 0.0
    results: dict[str, Values] = msgspec.field(name="eval")
    version: Literal[1] = 1


class Start(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A start of a run, one line of `starts.jsonl`.

    Attributes:
        step: steps done before, by the checkpoint it went on from; 0 for a new run.
        rewound: logged steps beyond that, whose weights are lost and which are trained again.
        lock: digest of the mixture; "" where the data come from none.
        global_batch_size: tokens of a step (instances where the data loader counts those), of the
            first one where the size changes.
        batch_size_changes: later sizes: (first step, counted from 1, tokens).
        world_size: ranks.
        skip: ranges of global rows left out, in the past and in the future of the run.
        bad: rows of a step with a non-finite loss or gradient. The run went back to this start
            to leave them out; they are among `skip`.
        time: when it was.
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
    config: JsonObject = {}  # msgspec gives each its own
    changes: tuple[str, ...] = ()
    version: Literal[1] = 1

    @property
    def batch_sizes(self) -> StepSizes:
        """Tokens of each step."""
        return StepSizes.recorded(self.global_batch_size, self.batch_size_changes)


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """What a run has logged.

    Attributes:
        folder: the `save_folder`.
        starts: oldest first; empty without `starts.jsonl`.
        steps, evaluations: in the order of the file; empty without `metrics.jsonl`.
        notes: what is to be told to who relies on it: cut off, missing or repeated lines.
    """

    folder: Path
    starts: list[Start]
    steps: list[Step]
    evaluations: list[Evaluation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: str | Path, *, metrics: Collection[str] = COUNTED) -> RunLog:
        """Read the log of a run folder, as far as there is one.

        Args:
            metrics: names of those to keep of each step.

        Raises:
            ValidationError: a line is not what a run writes.
        """
        folder, notes = Path(folder), list[str]()
        starts = read_starts(folder, notes)
        entries = list(read_metrics(folder, notes, metrics=metrics))
        steps = [entry for entry in entries if isinstance(entry, Step)]
        notes += incomplete(folder, starts, [step.step for step in steps])
        evaluations = [entry for entry in entries if isinstance(entry, Evaluation)]
        return cls(folder=folder, starts=starts, steps=steps, evaluations=evaluations, notes=notes)


def read_metrics(
    folder: Path, notes: list[str] | None = None, *, metrics: Collection[str] = ()
) -> Iterator[Step | Evaluation]:
    """Yield the lines of `metrics.jsonl`; none where there is no such file.

    Args:
        notes: takes a remark on a last line that is cut off.
        metrics: names of those to keep of each step.

    Raises:
        ValidationError: a line is not what a run writes.
    """
    path = folder / METRICS
    for number, line in lines(path, notes):
        yield decode_line(path, number, line, metrics)


def read_starts(folder: Path, notes: list[str] | None = None) -> list[Start]:
    """Return the starts of a run, oldest first; none where there is no such file.

    Args:
        notes: takes a remark on a last line that is cut off.

    Raises:
        ValidationError: a line is not what a run writes.
    """
    return read_lines(folder / STARTS, Start, notes)


def append_start(folder: Path, start: Start) -> None:
    """Add a line to `starts.jsonl`, atomically; a last line that is cut off goes."""
    append_line(folder / STARTS, msgspec.json.encode(start))


def keep_until(folder: Path, step: int | None, *, own: bool = True) -> tuple[int, list[str]]:
    """Remove the lines of steps beyond `step`, and a last line that is cut off, atomically.

    Args:
        step: of the checkpoint that the run goes on from; None: a new run, all lines go.
        own: whether that checkpoint is of this folder, whose log then has its steps.

    Returns:
        How many steps were removed, and remarks on lines that should be there and are not.

    Raises:
        ValidationError: a line is not what a run writes; then nothing is changed.
    """
    path, notes = folder / METRICS, list[str]()
    kept, numbers, removed = [], [], 0
    starts = read_starts(folder, notes)
    for number, line in lines(path, notes):
        entry = decode_line(path, number, line, ())
        if step is not None and entry.step <= step:
            kept.append(line)
            numbers += [entry.step] if isinstance(entry, Step) else []
        else:
            removed += isinstance(entry, Step)
    if path.exists():
        replace_file(path, b"".join(kept))
    return removed, [] if step is None else notes + incomplete(
        folder, starts, numbers, step, own=own
    )


class MetricsWriter:
    """Appends lines to `metrics.jsonl`; those that a full disk refuses wait in memory."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / METRICS, "ab", buffering=0)  # noqa: SIM115  # closed in `close`
        self._end = self._file.tell()  # bytes of whole lines in the file
        self._pending = b""  # lines that the disk has not taken yet

    def write(self, line: Step | Evaluation) -> None:
        """Append a line, after those that wait.

        Raises:
            OSError: it has to wait, and is the first that does.
            UsageError: a metric has the name of another field of the line.
        """
        waiting = bool(self._pending)
        self._pending += _encode(line)
        try:
            self._flush()
        except OSError:
            if not waiting:
                raise

    def sync(self) -> None:
        """Return when every line is on the disk.

        Raises:
            ResourceError: the disk refuses some; they go on waiting.
        """
        with io_errors(self._file.name, writing=True):
            self._flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; lines that wait are lost."""
        self._file.close()

    def _flush(self) -> None:
        """Write what is pending; where the disk takes only a part, take that back."""
        try:
            written = 0
            while written < len(self._pending):
                written += self._file.write(self._pending[written:])
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += written
        self._pending = b""


_FIELDS = tuple(name for name in Step.__struct_fields__ if name not in ("metrics", "line"))


def decode_line(
    path: Path, number: int, line: bytes, metrics: Collection[str] | None
) -> Step | Evaluation:
    """Return what a line of `metrics.jsonl` says; `metrics` None: keep all of them.

    Raises:
        ValidationError: it is not what a run writes.
    """
    try:
        plain = decode_object(line)
        if "eval" in plain:
            return convert(plain, Evaluation)
        names = plain.keys() - set(_FIELDS) if metrics is None else metrics
        return convert({**_of_step(plain, names), "line": number}, Step)
    except (MalformedJson, msgspec.ValidationError) as error:
        raise malformed_log(path, f"line {number}: {printable(str(error))}") from None


def decode_steps(lines: Sequence[bytes], metrics: Collection[str]) -> list[Step] | None:
    """Return what lines say, or None where that is not sure to be what `decode_line` says.

    As each line is in braces, a value neither goes on in the next one nor ends before its line
    does; as no colon is left over, no name stands twice, and no object in another.
    """
    data = b"".join(lines)
    braced = all(line.startswith(b"{") and line.endswith(b"}\n") for line in lines)
    if not braced or b"\\" in data or _is_wide(data):
        return None
    try:
        plain = _LINES.decode_lines(data)
        names = Counter(map(tuple, plain))
        colons = sum(n * sum(1 + name.count(":") for name in each) for each, n in names.items())
        if len(plain) != len(lines) or colons != data.count(b":"):
            return None
        return convert([_of_step(each, metrics) for each in plain], list[Step])
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError):
        return None


_LINES = decoder(JsonObject)
_DIGITS = bytes.maketrans(b"123456789", b"000000000")


def _is_wide(data: bytes) -> bool:
    """Whether a run of digits is longer than `bounded_json` takes, outside strings."""
    run = b"0" * (MAX_DIGITS + 1)
    return run in data.translate(_DIGITS) and run in b"".join(data.split(b'"')[::2]).translate(
        _DIGITS
    )


def _of_step(plain: JsonObject, metrics: Collection[str]) -> JsonObject:
    fields = {name: plain[name] for name in _FIELDS if name in plain}
    return {**fields, "metrics": {name: plain[name] for name in metrics if name in plain}}


def _encode(line: Step | Evaluation) -> bytes:
    plain: JsonObject = msgspec.to_builtins(line)
    metrics = plain.pop("metrics", {})
    if taken := metrics.keys() & {*_FIELDS, "eval"}:
        raise UsageError(
            f"a metric is named {min(taken)!r}",
            where=METRICS,
            why="a line of the log has a field of this name",
            fix="give the metric another name",
        )
    return json.dumps(_plain({**plain, **metrics}), allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Return a JSON value with null for what is NaN or infinite: JSON has neither."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


MOST_SHOWN = 3


def incomplete(
    folder: Path,
    starts: Sequence[Start],
    steps: Sequence[int],
    end: int | None = None,
    *,
    own: bool = True,
) -> list[str]:
    """Return remarks on what should be in a log and is not, or is there twice.

    Args:
        folder: of the run.
        starts: lines of `starts.jsonl`.
        steps: numbers of those in `metrics.jsonl`, in its order.
        end: the last step there should be; None: the last one there is.
        own: whether the steps up to `end` were trained in this folder.
    """
    metrics, log, begun = folder / METRICS, folder / STARTS, [start.step for start in starts]
    if end and own and not steps and not begun:
        return [
            f"{metrics} and {log.name} are missing or empty: what was trained up to step {end:,}, "
            "and rows that were left out, are not known"
        ]
    notes = []
    if steps and not begun:
        notes.append(
            f"{log} is missing or empty: earlier starts, and rows that they left out, are not known"
        )
    if begun and not metrics.exists():
        notes.append(f"{metrics} is missing: the steps before are not in the log")
    first = min(begun, default=steps[0] - 1 if steps else 0) + 1
    missing, repeated, due = [], [], first
    for step in steps:
        if step < due:
            repeated.append((step, step + 1))
        else:
            missing += [(due, step)] * (due < step)
            due = step + 1
    if metrics.exists() and end is not None and due <= end:
        missing.append((due, end + 1))
    notes += [f"{metrics} has no line of {_in_words(missing)}"] if missing else []
    notes += [f"{metrics} has more than one line of {_in_words(repeated)}"] if repeated else []
    return notes


def _in_words(ranges: Iterable[Range]) -> str:
    merged = merge_ranges(ranges)
    shown = [f"{a:,} to {b - 1:,}" if b - a > 1 else f"{a:,}" for a, b in merged[:MOST_SHOWN]]
    rest = len(merged) - MOST_SHOWN
    more = f" and {rest:,} more ranges" if rest > 0 else ""
    return f"step{'s' if len(shown) > 1 or merged[0][1] - merged[0][0] > 1 else ''} " + (
        ", ".join(shown) + more
    )


T = TypeVar("T")

ENDS = "ends.jsonl"

Reason = Literal["finished", "stopped", "cancelled", "failed"]


class End(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """An end of a run, one line of `ends.jsonl`.

    Attributes:
        step: the last step that was taken.
        time: when it was, seconds since 1970, UTC.
        reason: `finished` after the last step; `stopped` to be gone on with, by a signal or the
            time limit; `cancelled` to stay as it is; `failed` by an error. A run that goes back
            for a bad step fails and starts again.
        by: the signal, who cancelled, or the kind of the error; "" where it finished.
        why: what was said, without credentials.
    """

    step: Size
    time: Time = 0.0
    reason: Reason
    by: str = ""
    why: str = ""
    version: Literal[1] = 1


def read_ends(folder: Path, notes: list[str] | None = None) -> list[End]:
    """Return the ends of a run, oldest first; none where there is no such file.

    Args:
        notes: takes a remark on a last line that is cut off.

    Raises:
        ValidationError: a line is not what a run writes.
    """
    return read_lines(folder / ENDS, End, notes)


def append_end(folder: Path, end: End) -> None:
    """Add a line to `ends.jsonl`, atomically; a last line that is cut off goes."""
    append_line(folder / ENDS, msgspec.json.encode(end))


def is_over(run: Store) -> bool:
    """Whether the last start of a run, local or remote, finished or was cancelled.

    One that was stopped or failed goes on when it is started again; so may one without an end.

    Raises:
        ValidationError: a last line is not what a run writes.
        StorageError: the store cannot be read.
    """
    end, start = _last(run, ENDS, End), _last(run, STARTS, Start)
    over = end is not None and end.reason in ("finished", "cancelled")
    return over and (start is None or end is None or end.time >= start.time)


def _last(run: Store, name: str, kind: type[T]) -> T | None:
    """Return what the last whole line of a file says; None: there is none."""
    try:
        whole = run.read(name).rpartition(b"\n")[0]
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return decode(whole.rpartition(b"\n")[2], kind) if whole else None
    except MalformedJson as error:
        raise malformed_log(Path(run.url(name)), str(error)) from None
