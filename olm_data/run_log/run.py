"""What a run folder says of the order it trained in: batch sizes, skipped rows, logged steps.

    config.json   -> global batch sizes, micro-batch, `skip`
    metrics.jsonl -> Step, ...: rows, skipped ranges, order digest

Ranges may have been added to `skip`, and taken out again, while the run went on; what was skipped
in the past is what the log says. Never: believe the log; who shows or verifies it checks the order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import msgspec

from olm_data.bounded_json import MalformedJson, decode
from olm_data.errors import InputError, UsageError, printable
from olm_data.order.skip import Range, merge_ranges
from olm_data.order.steps import BatchSizeChange, StepSizes
from olm_data.regular_files import MAX_CONFIG, read_regular
from olm_data.run_log.log import METRICS, RunLog, Step, malformed_log

CONFIG = "config.json"


class _DataLoader(msgspec.Struct, frozen=True):
    global_batch_size: int | None = None
    batch_size_schedule: tuple[BatchSizeChange, ...] | None = None
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
            InputError: the folder has neither a configuration nor a log.
            ValidationError: one of them is malformed.
        """
        folder = Path(path)
        config, log = _read_config(folder / CONFIG), RunLog.read(folder)
        if config is None and not log.steps:
            raise InputError(
                f"this is not a run folder: it has no {CONFIG} and no {METRICS}",
                where=path,
                fix="give the trainer.save_folder of a run",
            )
        loader = (config and config.data_loader) or _DataLoader()
        module = (config and config.train_module) or _TrainModule()
        try:
            skip = merge_ranges(loader.skip or ())
            sizes = _batch_sizes(loader, log.steps)
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


def _batch_sizes(loader: _DataLoader, steps: list[Step]) -> StepSizes | None:
    """Return the tokens of each step by the configuration, else by the log; None by neither."""
    if loader.global_batch_size is not None:
        changes = loader.batch_size_schedule or ()
        return StepSizes.scheduled(loader.global_batch_size, changes)
    tokens = [0, *(step.tokens for step in steps)]
    return StepSizes(tuple(enumerate(b - a for a, b in pairwise(tokens)))) if steps else None


def _read_config(path: Path) -> _Config | None:
    if not path.exists():
        return None
    try:
        return decode(read_regular(path, MAX_CONFIG), _Config)
    except MalformedJson as error:
        raise malformed_log(path, str(error)) from None
