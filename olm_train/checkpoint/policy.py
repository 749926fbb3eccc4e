"""What the user decides about checkpoints: when they are saved, how long they stay, where to begin.

Pure: rules over steps and kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta

from olm_data.config.convert import Config
from olm_data.config.hints import Needs, PositiveFloat, PositiveInt
from olm_data.errors import UsageError
from olm_train.checkpoint.manifest import Kind


class Removal(StrEnum):
    """What is removed after a new checkpoint is complete and verifies."""

    ephemeral_only = "ephemeral_only"
    """Only those saved at `ephemeral_save_interval` or on preemption."""
    all_non_permanent = "all_non_permanent"
    """Everything not saved at an interval or a fixed step, also the end of an earlier, shorter
    run."""
    never = "never"
    """Nothing, whatever `max_checkpoints` says."""


Vocabulary = Literal["keep", "extend"]
"""What is done where the data has ids that the model to begin with does not know."""

FixedStep = Annotated[
    int, Meta(ge=1, description="pre_train_checkpoint: true makes the checkpoint of step 0")
]


@dataclass(frozen=True, kw_only=True)
class CheckpointerConfig(Config):
    """When checkpoints are written and how long they stay.

    Attributes:
        enabled: false: no checkpoint at all, not even on preemption.
        save_interval: steps between permanent checkpoints; default: 250, and none but those of
            `save_steps` where there are some.
        save_steps: further steps with a permanent checkpoint, ascending.
        ephemeral_save_interval: steps between checkpoints that stay until the next one; null: none.
        ephemeral_cooldown: no ephemeral checkpoint for so many steps after one that stays; null: 0.
        fixed_steps: further steps with a checkpoint, which is never removed.
        pre_train_checkpoint: also one of step 0, which is never removed.
        save_async: write beside the training, from a copy of the state in main memory (page-locked
            on CUDA) that is complete before the next step begins; default: on CUDA.
        save_timeout: seconds after which a save that is not finished, or a rank that does not
            answer in one, ends the run.
        remove: what goes after a new checkpoint is complete and has been read back:
            `ephemeral_only`, `all_non_permanent` or `never`; the newest good one always stays.
        max_checkpoints: so many of the checkpoints of `save_interval` stay, the newest; null: all.
    """

    enabled: bool = True
    save_interval: PositiveInt | None = None
    save_steps: list[PositiveInt] = field(default_factory=list)
    ephemeral_save_interval: PositiveInt | None = None
    ephemeral_cooldown: Annotated[PositiveInt | None, Needs("ephemeral_save_interval")] = None
    fixed_steps: list[FixedStep] = field(default_factory=list)
    pre_train_checkpoint: bool = False
    save_async: bool | None = None
    save_timeout: PositiveFloat = 3600.0
    remove: Removal = Removal.ephemeral_only
    max_checkpoints: Annotated[PositiveInt | None, Needs("remove", unless=Removal.never)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(a >= b for a, b in pairwise(self.save_steps)):
            raise UsageError(
                f"the steps are not ascending: {self.save_steps}",
                where="save_steps",
                fix="sort them, each one once",
            )
        often, interval = self.ephemeral_save_interval, self.interval
        if often is not None and interval is not None and often >= interval:
            raise UsageError(
                f"ephemeral_save_interval {often} is not below save_interval {interval}",
                fix="ephemeral checkpoints are the frequent ones",
            )

    @property
    def interval(self) -> int | None:
        """Steps between permanent checkpoints; None: only `save_steps`."""
        return self.save_interval or (None if self.save_steps else 250)

    def explicit_steps(self) -> dict[str, list[int]]:
        """Return the steps that are named one by one, by option."""
        if not self.enabled:
            return {}
        steps = {"save_steps": self.save_steps, "fixed_steps": self.fixed_steps}
        return {f"checkpointer.{option}": named for option, named in steps.items()}

    def kind_at(self, step: int, last: int) -> Kind | None:
        """Return the kind of checkpoint that is due after `step`, None for none.

        Args:
            step: optimiser steps done; 0: before training.
            last: step at which the run ends.
        """
        often = self.ephemeral_save_interval
        if step == 0:
            return Kind.fixed if self.pre_train_checkpoint else None
        if step in self.fixed_steps:
            return Kind.fixed
        if step in self.save_steps or (self.interval is not None and step % self.interval == 0):
            return Kind.permanent
        if step == last:
            return Kind.final
        if often is None or step % often:
            return None
        cools_down = any(step - at <= (self.ephemeral_cooldown or 0) for at in self._stay(step))
        return None if cools_down else Kind.ephemeral

    def _stay(self, step: int) -> list[int]:
        """Return steps before `step` whose checkpoints stay, the last of the interval with them."""
        interval = self.interval
        stay = [] if interval is None or step <= interval else [step - step % interval]
        return [*stay, *(at for at in (*self.save_steps, *self.fixed_steps) if at < step)]


def removable(
    known: Mapping[int, Kind], newest_good: int, remove: Removal, keep: int | None = None
) -> list[int]:
    """Return the steps whose checkpoints may be removed, oldest first.

    Args:
        known: kind of each complete checkpoint by step.
        newest_good: step of the newest checkpoint known to be complete; it always stays, and so
            does everything newer.
        remove: the user's rule.
        keep: so many of the newest permanent ones stay; None: all of them.
    """
    if remove is Removal.never:
        return []
    kinds = {
        Removal.ephemeral_only: {Kind.ephemeral},
        Removal.all_non_permanent: {Kind.ephemeral, Kind.final},
    }[remove]
    gone = {step for step, kind in known.items() if kind in kinds}
    if keep is not None:
        permanent = sorted(step for step, kind in known.items() if kind is Kind.permanent)
        gone |= set(permanent[: max(0, len(permanent) - keep)])
    return sorted(step for step in gone if step < newest_good)


class LoadStrategy(StrEnum):
    """What a run does with checkpoints in its save folder."""

    if_available = "if_available"
    """Go on from the newest one that verifies; start anew when there is none."""
    always = "always"
    """Go on from the newest one that verifies; an error when there is none."""
    never = "never"
    """Start anew; an error when there is one, since its run would be lost."""


@dataclass(frozen=True, kw_only=True)
class LoadPolicy(Config):
    """Where a run begins.

    Attributes:
        strategy: what to do with checkpoints in the save folder.
        strict: a newer checkpoint that does not verify is an error, not a warning.
        path: checkpoint, run or exported weights to begin with where the save folder has none.
        trainer_state: take step, data position and callbacks' state from `path` too.
        optim_state: take the optimiser's state from `path` too.
        vocabulary: of a model of transformers at `path`, where the data has more ids: `keep` is
            refused, `extend` adds rows.
        upcycle: the model at `path` is dense, and the one to train a mixture of experts that begins
            as copies of its feed-forward layers.
    """

    strategy: LoadStrategy = LoadStrategy.if_available
    strict: Annotated[bool, Needs("strategy", unless=LoadStrategy.never)] = False
    path: Annotated[str | None, Needs("strategy", unless=LoadStrategy.never)] = None
    trainer_state: Annotated[bool, Needs("path")] = True
    optim_state: Annotated[bool, Needs("path")] = True
    vocabulary: Annotated[Vocabulary, Needs("path")] = "keep"
    upcycle: Annotated[bool, Needs("path")] = False

    def require_weights_alone(self, what: str) -> None:
        """Refuse to take more than weights from `path`, where it has no more."""
        if self.trainer_state or self.optim_state:
            raise UsageError(
                f"{what} without the state of a trainer or an optimiser",
                where="trainer.load_path",
                fix="set trainer.load_trainer_state and trainer.load_optim_state to false",
            )
