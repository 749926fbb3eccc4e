"""Stages of a lock as the manifest has them: the parts of one stage put together.

Lock --manifest_stages--> ManifestStage, one for each stage of the manifest
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from olm_data.mixture.lock import Lock
from olm_data.mixture.lock_format import LockStage


@dataclass(frozen=True)
class ManifestStage:
    """One stage of the manifest; `parts` are its stages in the lock, most often one."""

    parts: tuple[LockStage, ...]

    @property
    def name(self) -> str:
        """Name in the manifest."""
        return self.parts[0].name

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def tokens(self) -> int:
        """Tokens of all parts, as the manifest says them."""
        return sum(part.tokens for part in self.parts)

    @cached_property
    def rows_by_source(self) -> tuple[int, ...]:
        """Rows of each source, in the order of the lock's sources."""
        return tuple(map(sum, zip(*(part.rows_by_source for part in self.parts), strict=True)))

    @cached_property
    def wanted(self) -> tuple[Fraction, ...]:
        """The share asked for of each source."""
        return tuple(map(Fraction, self.parts[0].wanted))

    @property
    def exact(self) -> bool:
        """Whether the stage is a number of rows of each source, by epochs or after capping."""
        return bool(self.parts[0].epochs or self.parts[0].capped)

    def compiled(self, index: int) -> Fraction:
        """Return the share that a source has in the long run of the stage."""
        if self.exact:
            return Fraction(self.rows_by_source[index], self.rows)
        return Fraction(self.parts[0].counts[index], self.parts[0].block)


def manifest_stages(lock: Lock) -> list[ManifestStage]:
    """Return the stages of a lock with their parts together, in the order of the run."""
    found: list[list[LockStage]] = []
    for stage in lock.stages:
        if not stage.part:
            found.append([])
        found[-1].append(stage)
    return [ManifestStage(tuple(parts)) for parts in found]
