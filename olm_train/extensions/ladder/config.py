"""What ladder.yaml says: the base of all points, their sizes and lengths, what judges them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from olm_data.config.convert import Config, parse
from olm_data.config.hints import FilePath, LocalPath, PositiveFloat, PositiveInt
from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_train.duration import Duration, DurationUnit
from olm_train.extensions.ladder.law import EPOCH, HOFFMANN, Law

UNITS = (DurationUnit.tokens, DurationUnit.chinchilla)
"""Of the lengths of a ladder."""


def refuse_units(length: Duration) -> None:
    """Refuse the length of a point that is not counted in tokens."""
    if length.unit not in UNITS or not length.value:
        raise UsageError(
            f"a length of a ladder is in tokens or chinchilla, above 0, not {length}",
            where="tokens",
        )


@dataclass(frozen=True, kw_only=True)
class LadderConfig(Config):
    """A ladder: a run for each size, length, rate and batch size.

    Attributes:
        base: train.yaml of all of them.
        folder: where the points are trained, each in a folder of its own, and what they found.
        sizes: of each size the options that make it of the base: `{model.depth: 6}`.
        tokens: lengths: of each the duration, in `tokens` or `chinchilla`.
        lrs: peak rates; default: the base's.
        batch_sizes: tokens of a step; default: the base's.
        dataset: held-out set of the base's `lm_evaluator` whose loss counts; default: its only one.
        gpu, mfu: what hours are counted for: an accelerator, and the share of its peak.
        noise: standard deviation of a loss by the seed of a run, relative, that is planned with.
        prior: law that is taken for true in the plan.
    """

    base: FilePath
    folder: LocalPath
    sizes: Annotated[list[dict[str, Any]], Meta(min_length=1, examples=["[{model.depth: 6}]"])]
    tokens: Annotated[list[Duration], Meta(min_length=1)]
    lrs: list[PositiveFloat] = field(default_factory=list)
    batch_sizes: list[PositiveInt] = field(default_factory=list)
    dataset: str | None = None
    gpu: str = "h100"
    mfu: Annotated[float, Meta(gt=0, le=1)] = 0.4
    noise: Annotated[float, Meta(gt=0, lt=1)] = 0.003
    prior: Literal["epoch", "hoffmann"] = "epoch"

    def __post_init__(self) -> None:
        super().__post_init__()
        for length in self.tokens:
            refuse_units(length)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LadderConfig:
        """Read a ladder.yaml.

        Raises:
            UsageError: it cannot be read, or a field is unknown, missing or of the wrong type.
        """
        return parse(cls, Values.read(path, example="ladder.yaml"))

    @property
    def law(self) -> Law:
        """The law that is taken for true."""
        return {"epoch": EPOCH, "hoffmann": HOFFMANN}[self.prior]
