"""Before the first step all ranks say what they are about to train; a difference ends the run.

    rank, world size, digests of lock and configuration --gloo--> all equal, or refused

Ranks on different machines may have been given different files; training would then go on with
wrong data or weights and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from olm_data.bounded_json import JsonObject, digest
from olm_data.errors import ValidationError
from olm_train.distributed.world import World


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """What a rank was told to train; digests are sha256 in hex.

    Attributes:
        rank, world_size: as this rank was told.
        lock: digest of the mixture lock.
        config: digest of the resolved configuration, seed included.
    """

    rank: int
    world_size: int
    lock: str
    config: str

    @classmethod
    def of(cls, world: World, lock: str, config: JsonObject) -> RankSettings:
        """Return those of this rank, made of its resolved configuration."""
        plain = digest({"config": repr(sorted(_flat(config)))})
        return cls(rank=world.rank, world_size=world.size, lock=lock, config=plain)


def require_agreement(world: World, mine: RankSettings) -> None:
    """Compare the settings of all ranks; every rank calls it.

    Raises:
        ValidationError: the ranks differ, the same error on every rank.
    """
    problems = differences(world.gather(mine))
    if problems:
        raise ValidationError(
            "the ranks of this run do not agree:\n" + "\n".join(f"    {p}" for p in problems),
            why="they would train on other rows or with other settings, and mix the results",
            fix="give every machine the same lock, configuration and release, and start again",
        )


def differences(all_ranks: Sequence[RankSettings]) -> list[str]:
    """Return one line for each thing in which ranks differ from the first one, or for wrong ranks.

    Args:
        all_ranks: their settings, in the order in which the group numbers its members.
    """
    problems = []
    for place, other in enumerate(all_ranks):
        if other.rank != place or other.world_size != len(all_ranks):
            problems.append(
                f"process {place} of {len(all_ranks)} was told to be rank {other.rank} of "
                f"{other.world_size}"
            )
    first = asdict(all_ranks[0])
    for name, what in (("lock", "mixture lock"), ("config", "configuration")):
        others = [one for one in all_ranks if getattr(one, name) != first[name]]
        if others:
            shown = ", ".join(f"rank {one.rank}: {getattr(one, name)[:12]}" for one in others[:8])
            problems.append(f"{what}: rank {all_ranks[0].rank}: {first[name][:12]}, {shown}")
    return problems


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Return (path, repr) of each leaf: canonical JSON has no floats."""
    if isinstance(value, Mapping):
        return [pair for key in value for pair in _flat(value[key], f"{path}.{key}")]
    return [(path, repr(value))]
