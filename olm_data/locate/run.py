"""What a run folder says of the order it trained in: batch sizes, skipped rows, logged steps.

    config.json   -> global batch sizes, micro-batch, `skip`
    metrics.jsonl -> LoggedStep, ...: rows, skipped ranges, order digest

Ranges may have been added to `skip`, and taken out again, while the run went on; what was skipped
in the past is what the log says. Never: believe the log; verify_log.py checks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from olm_data.bounded_json import MalformedJson, decode_object
from olm_data.errors import InputError, UsageError, printable
from olm_data.json_lines import LogEnd, json_lines, malformed_log
from olm_data.order.skip import Range, clip_ranges, merge_ranges
from olm_data.order.steps import BatchSizeChange, StepSizes
from olm_data.regular_files import MAX_CONFIG, read_regular
from olm_data.run_log.metric_names import STEP_SKIPPED, TOKENS

LOG, CONFIG = "metrics.jsonl", "config.json"


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step of a log.

    Attributes:
        line: line of the file, from 1.
        step: its number, from 1.
        tokens: tokens trained on so far.
        rows: half-open range of global rows.
        skipped: ranges inside `rows` that were left out.
        order: the order digest, or None in logs without.
        trained: tokens of the step as counted on the devices, or None in logs without.
        taken: whether the weights moved: a spike, or a non-finite loss, may be left out.
    """

    line: int
    step: int
    tokens: int
    rows: Range
    skipped: tuple[Range, ...]
    order: str | None
    trained: int | None = None
    taken: bool = True


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder.

    Attributes:
        folder: the `save_folder`.
        batch_sizes: tokens of each step.
        microbatch_size: tokens of a micro-batch of a rank, None if not recorded.
        configured_skip: `skip` of the configuration of the latest start.
        steps: the logged ones, in the order of the file; empty without a log.
        notes: what of the log was left out.
    """

    folder: Path
    batch_sizes: StepSizes
    microbatch_size: int | None
    configured_skip: tuple[Range, ...]
    steps: list[LoggedStep]
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
            InputError: the folder has neither a configuration nor a log.
            ValidationError: one of them is malformed.
        """
        folder = Path(path)
        end = LogEnd()
        config, steps = _config(folder / CONFIG), list(read_steps(folder / LOG, end))
        if config is None and not steps:
            raise InputError(
                f"this is not a run folder: it has no {CONFIG} and no {LOG}",
                where=path,
                fix="give the trainer.save_folder of a run",
            )
        loader = (config or {}).get("data_loader") or {}
        module = (config or {}).get("train_module") or {}
        try:
            microbatch_size = module.get("rank_microbatch_size")
            skip = merge_ranges(loader.get("skip") or [])
            sizes = _batch_sizes(loader, steps)
        except (UsageError, TypeError, ValueError, AttributeError, OverflowError) as error:
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
            microbatch_size=microbatch_size if isinstance(microbatch_size, int) else None,
            configured_skip=skip,
            steps=steps,
            notes=end.note(folder / LOG),
        )


def _batch_sizes(loader: dict[str, Any], steps: list[LoggedStep]) -> StepSizes | None:
    """Return the tokens of each step by the configuration, else by the log; None by neither."""
    size = loader.get("global_batch_size")
    if size is not None:
        changes = [BatchSizeChange(**item) for item in loader.get("batch_size_schedule") or []]
        return StepSizes.scheduled(size, changes)
    tokens = [0, *(step.tokens for step in steps)]
    return StepSizes(tuple(enumerate(b - a for a, b in pairwise(tokens)))) if steps else None


def _config(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return decode_object(read_regular(path, MAX_CONFIG))
    except MalformedJson as error:
        raise malformed_log(path, str(error)) from None


def read_steps(path: Path, end: LogEnd | None = None) -> Iterator[LoggedStep]:
    """Yield the steps of a log; a last line without its end is one that is being written.

    Raises:
        ValidationError: a line is not what a run writes.
    """
    if not path.exists():
        return
    for number, entry in json_lines(path, end):
        if "eval" in entry:
            continue
        try:
            step = _step(number, entry)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise malformed_log(path, f"line {number}: {printable(str(error))}") from error
        yield step


def _step(number: int, entry: dict[str, Any]) -> LoggedStep:
    step, tokens, (first, end) = entry["step"], entry["tokens"], entry["rows"]
    order, trained = entry.get("order"), entry.get(TOKENS)
    if not all(type(value) is int for value in (step, tokens, first, end)) or not 0 <= first < end:
        raise ValueError("step, tokens and rows are not what a run writes")
    if order is not None and not isinstance(order, str):
        raise ValueError("the order digest is not what a run writes")
    if trained is not None:
        trained = int(trained)
    skipped = merge_ranges(entry.get("skipped", []))
    if clip_ranges(skipped, first, end) != skipped:
        raise ValueError("skipped rows are not among those of the step")
    taken = not entry.get(STEP_SKIPPED)
    return LoggedStep(number, step, tokens, (first, end), skipped, order, trained, taken)
