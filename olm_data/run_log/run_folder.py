"""The files of a run folder beside its log, and what it says of the order it trained in.

    config.json      -> global batch sizes, micro-batch, `skip` --.
    metrics.jsonl    -> rows, skipped ranges, order digests ------+--> Run
    sample.json      <- Sample                     text that the trained model made
    environment.json <- versions, device and driver of the latest start
    step00000100/    -> Position                    how far a checkpoint has come in its data

Ranges may have been added to `skip`, and taken out again, while the run went on; what was skipped
in the past is what the log says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from olm_data.bounded_json import MalformedJson, Size, decode, indented
from olm_data.errors import InputError, UsageError, ValidationError, printable
from olm_data.order.steps import Range, StepSizes, merge_ranges
from olm_data.path_kinds import nearest
from olm_data.regular_files import read_regular
from olm_data.run_log.lines import malformed_log, read_lines, replace_file
from olm_data.run_log.log import METRICS, RunLog, Step, Time
from olm_data.storage.disk import write_durable
from olm_data.storage.store import Store, absolute, read_json

T = TypeVar("T")

CONFIG, SAMPLE, ENVIRONMENT = "config.json", "sample.json", "environment.json"
LEASE = "lease-"
"""Start of the name of the lease by which a run holds its folder; `.lease-` in another work_dir."""


_MANIFEST = "manifest.json"
_WHOLE = re.compile(r"(step(\d{8,}))/" + re.escape(_MANIFEST))
"""The file of a checkpoint, in the folder of its run, that is written last."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Text that a model made, and how; `ids` are its tokens, without those of the prompt.

    `finish`: "stop": at a stop string or the end of a document; "length": cut off. None: not known.
    """

    prompt: str
    text: str
    ids: tuple[int, ...]
    checkpoint: str
    temperature: float
    top_k: int
    seed: int
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    finish: Literal["stop", "length"] | None = None

    def encode(self) -> bytes:
        """Return the bytes of `sample.json`."""
        return indented(self)

    def line(self) -> bytes:
        """Return it as a line of a file of several."""
        return json.dumps(msgspec.to_builtins(self)).encode() + b"\n"

    @classmethod
    def read(cls, folder: Path) -> Sample | None:
        """Read `sample.json` of a run folder; None where there is none.

        Raises:
            ValidationError: it is malformed.
        """
        return _read(folder / SAMPLE, cls)


def read_environment(folder: Path) -> dict[str, str] | None:
    """Read `environment.json` of a run folder: versions by what they are of; None without.

    Raises:
        ValidationError: it is malformed.
    """
    return _read(folder / ENVIRONMENT, dict[str, str])


def write_environment(folder: Path, versions: Mapping[str, str]) -> None:
    """Write `environment.json` of a run folder, replacing the one there."""
    write_durable(folder / ENVIRONMENT, indented(versions))


class _DataLoader(msgspec.Struct, frozen=True):
    global_batch_size: int | None = None
    skip: tuple[tuple[int, ...], ...] | None = None


class _TrainModule(msgspec.Struct, frozen=True):
    rank_microbatch_size: int | None = None


class _Config(msgspec.Struct, frozen=True):
    """The parts of a run's configuration that say what its steps are made of."""

    data_loader: _DataLoader | None = None
    train_module: _TrainModule | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder.

    Attributes:
        folder: the `save_folder`.
        batch_sizes: tokens of each step.
        microbatch_size: tokens of a micro-batch of a rank, None if not recorded.
        configured_skip: `skip` of the configuration of the latest start.
        steps: the logged ones, in the order of the file; empty without a log.
        notes: what is to be told of the log.
    """

    folder: Path
    batch_sizes: StepSizes
    microbatch_size: int | None
    configured_skip: tuple[Range, ...]
    steps: list[Step]
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The last step that was trained and logged; 0 for none."""
        return self.steps[-1].step if self.steps else 0

    @cached_property
    def not_taken(self) -> frozenset[int]:
        """The logged steps that left the weights as they were."""
        return frozenset(step.step for step in self.steps if not step.taken)

    def skip(self) -> tuple[Range, ...]:
        """Return what the run has skipped, by its log, and will skip, by its configuration."""
        return merge_ranges([*self.configured_skip, *self.skipped_so_far()])

    def skipped_so_far(self) -> tuple[Range, ...]:
        """Return the rows that the log passes over: inside steps, and between them."""
        inside = [item for step in self.steps for item in step.skipped]
        ends = [0, *(step.rows[1] for step in self.steps)]
        begins = [step.rows[0] for step in self.steps]
        between = [(a, b) for a, b in zip(ends, begins, strict=False) if a < b]
        return merge_ranges([*inside, *between])

    @classmethod
    def read(cls, path: str) -> Run:
        """Read a run folder.

        Raises:
            InputError: the folder has neither a configuration nor a log, or the data of its run
                came from no mixture lock.
            ValidationError: one of them is malformed.
        """
        folder = Path(path)
        config, log = _read(folder / CONFIG, _Config), RunLog.read(folder)
        if config is None and not log.steps:
            raise InputError(
                f"this is not a run folder: it has no {CONFIG} and no {METRICS}",
                where=path,
                fix=nearest(path, "give the trainer.save_folder of a run"),
            )
        refuse_without_lock(log)
        loader = (config and config.data_loader) or _DataLoader()
        module = (config and config.train_module) or _TrainModule()
        try:
            skip = merge_ranges(loader.skip or ())
            sizes = _batch_sizes(loader, log)
        except (UsageError, OverflowError) as error:
            raise malformed_log(folder / CONFIG, printable(str(error))[:200]) from error
        if sizes is None:
            raise InputError(
                "the run does not say its global batch size",
                where=str(folder / CONFIG),
                fix="say it: --global-batch TOKENS, instead of --run",
            )
        return cls(
            folder=folder,
            batch_sizes=sizes,
            microbatch_size=module.rank_microbatch_size,
            configured_skip=skip,
            steps=log.steps,
            notes=log.notes,
        )


class CheckpointPosition(msgspec.Struct, frozen=True, kw_only=True):
    """How far the checkpoint in `folder` has come: so many rows of the lock of that digest."""

    folder: str
    lock: str
    rows: int


class _Manifest(msgspec.Struct, frozen=True):
    format: Literal["olm-checkpoint"]
    lock_digest: str
    folder: str = ""


class _LoaderState(msgspec.Struct, frozen=True):
    rows_consumed: Size


class _State(msgspec.Struct, frozen=True):
    data_loader: _LoaderState


def read_position(place: str) -> CheckpointPosition:
    """Read the position of a checkpoint, or of the newest one of a run; local or remote.

    Its weights are not looked at: whoever goes on from it checks them.

    Raises:
        InputError: there is no checkpoint, or the data of its run came from no mixture lock.
        ValidationError: it is malformed.
    """
    store = Store(absolute(place))
    if not store.exists(_MANIFEST):
        found = filter(None, (_WHOLE.fullmatch(entry.name) for entry in store.entries()))
        newest = max(found, key=lambda match: int(match[2]), default=None)
        if newest is None:
            raise InputError(
                "there is no checkpoint here",
                where=place,
                fix=nearest(place, "give the trainer.save_folder of a run that saved one"),
            )
        store = store.child(newest[1])
    try:
        manifest = decode(read_json(store, _MANIFEST), _Manifest)
        if not manifest.lock_digest:
            raise InputError("the data of this run came from no mixture lock", where=store.root)
        files = store.child(manifest.folder) if manifest.folder else store
        state = decode(read_json(files, "train.json"), _State)
    except (MalformedJson, FileNotFoundError) as error:
        raise ValidationError(
            f"this is no whole checkpoint: {printable(str(error))[:200]}",
            where=store.root,
            fix="give an earlier checkpoint of the run",
        ) from None
    rows = state.data_loader.rows_consumed
    return CheckpointPosition(folder=store.root, lock=manifest.lock_digest, rows=rows)


def refuse_without_lock(log: RunLog) -> None:
    """Refuse a run whose rows nobody knows.

    Raises:
        InputError: its data came from no mixture lock.
    """
    if any(step.version == 2 for step in log.steps) or any(not s.lock for s in log.starts):
        raise InputError(
            "the data of this run came from no mixture lock: a data loader of its own gave them",
            where=str(log.folder),
            why="which rows and documents a step was made of is known from a lock alone",
            fix="give a run that was trained on a lock; losses and metrics of this one are in "
            f"{METRICS}",
        )


def _batch_sizes(loader: _DataLoader, log: RunLog) -> StepSizes | None:
    """Return the tokens of each step as the last start had them, else by the log of steps; None:
    neither says it."""
    if loader.global_batch_size is not None:
        if log.starts:
            return log.starts[-1].batch_sizes
        return StepSizes.constant(loader.global_batch_size)
    tokens = [0, *(step.tokens for step in log.steps)]
    return StepSizes(tuple(enumerate(b - a for a, b in pairwise(tokens)))) if log.steps else None


def _read(path: Path, kind: type[T]) -> T | None:
    return _decoded(path, kind) if path.exists() else None


def _decoded(path: Path, kind: type[T]) -> T:
    try:
        return decode(read_regular(path), kind)
    except MalformedJson as error:
        raise malformed_log(path, str(error)) from None


_NAME = re.compile(r"(bad|spike)-step([0-9]{1,18})\.json")


class BadDocument(msgspec.Struct, frozen=True):
    """A document of a row, as `olm_data.rows.views.DocumentView` has it."""

    id: str | None
    input: str
    position: Size
    position_kind: str
    shard: str
    document: Size
    start: Size
    stop: Size


class BadRow(msgspec.Struct, frozen=True):
    """A row of a bad step, and where it comes from."""

    row: Size
    stage: str | None
    source: str | None
    documents: list[BadDocument]


class BadStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step whose loss or gradient norm, spelt out here, is a spike or not finite.

    Attributes:
        incomplete: why not all rows could be read.
    """

    step: Size
    loss: str
    grad_norm: str
    incomplete: str | None = None
    rows: list[BadRow]

    def write(self, path: Path) -> None:
        """Write it, durably."""
        write_durable(path, indented(self))

    @classmethod
    def read(cls, path: Path) -> BadStep:
        """Read one.

        Raises:
            ValidationError: the file is malformed.
        """
        return _decoded(path, cls)

    def places(self) -> list[str]:
        """Return where each document was read: source, file, row or line."""
        return [
            f"{row.source} {piece.input} {piece.position_kind} {piece.position}"
            for row in self.rows
            for piece in row.documents
        ]


def bad_step_files(folder: Path) -> list[tuple[int, str, Path]]:
    """Return (step, "bad" or "spike", path) of those of a run folder, by step."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("*-step*.json"))
    return sorted((int(name[2]), name[1], path) for name, path in found if name)


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
