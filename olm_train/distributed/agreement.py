"""Before the first step all ranks say what they are about to train; a difference ends the run.

    rank, world size, digests of lock and configuration --gloo--> all equal, or refused

Ranks on different machines may have been given different files; training would then go on with
wrong data or weights and nobody would notice.
"""

from __future__ import annotations

import json

from olm_data.bounded_json import JsonObject, digest
from olm_data.errors import ValidationError
from olm_train.distributed.world import World


def require_agreement(world: World, lock: str, config: JsonObject) -> None:
    """Compare what all ranks are told to train; every rank calls it.

    Args:
        lock: digest of the mixture lock.
        config: the resolved configuration, seed included.

    Raises:
        ValidationError: the ranks differ, the same error on every rank.
    """
    text = json.dumps(config, sort_keys=True)  # a digest takes no floats
    whole = digest({"config": text})
    every = world.gather({"mixture lock": lock, "configuration": whole})
    problems = []
    for what, first in every[0].items():
        others = [
            f"rank {n}: {one[what][:12]}" for n, one in enumerate(every) if one[what] != first
        ]
        if others:
            problems.append(f"\n    {what}: rank 0: {first[:12]}, {', '.join(others[:8])}")
    if problems:
        raise ValidationError(
            f"the ranks of this run do not agree:{''.join(problems)}",
            why="they would train on other rows or with other settings, and mix the results",
            fix="give every machine the same lock, configuration and release, and start again",
        )
