"""A run owns its save folder: rank 0 holds the lease, and all ranks stop where it is lost.

rank 0: lease on the save folder (and on another work_dir) -> beats beside the training
        taken over? --agreed with preemption, before each step--> every rank: exit 7
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from olm_data.config.convert import Config
from olm_data.errors import ConflictError
from olm_data.path_kinds import WORDS, kind_of
from olm_data.run_log.run_folder import LEASE
from olm_data.storage.exclusive import exclusive
from olm_data.storage.lease import (
    LONGEST_TAKEOVER,
    SHORTEST_TAKEOVER,
    TAKEOVER_SECONDS,
    Fence,
    Lease,
)
from olm_data.storage.store import Store
from olm_train.distributed.world import World

BUSY = "another process trains into this folder"
FIX = "wait for it to end, or choose another trainer.save_folder"


Takeover = Annotated[float, Meta(ge=SHORTEST_TAKEOVER, le=LONGEST_TAKEOVER)]


@dataclass(frozen=True, kw_only=True)
class LeasePolicy(Config):
    """How a save folder is held.

    Attributes:
        takeover_seconds: without a sign of life for so long, another start may take over.
        single_writer: nobody else writes there: for a store without conditional creates.

    Raises:
        UsageError: the time is too short or too long.
    """

    takeover_seconds: Takeover = TAKEOVER_SECONDS
    single_writer: bool = False


def refuse_taken(save_folder: str) -> None:
    """Refuse a local save folder that holds something else, whose files a run would write over.

    Raises:
        ConflictError: it is a dataset, a checkpoint, or a model.
    """
    found = kind_of(save_folder)
    if found in ("dataset", "unfinished dataset", "checkpoint", "model"):
        held = "a model" if found == "model" else WORDS[found]  # of transformers, or an export
        raise ConflictError(
            f"the save folder is {held}, not one of a run",
            where=save_folder,
            why="both have files of the same names, such as config.json",
            fix="give trainer.save_folder a new folder",
        )


class RunLock:
    """Context manager: the save folder is ours; every rank enters it.

    Args:
        save_folder: the run's folder, local or remote.
        work_dir: local folder of its logs.
        world: the ranks of the run.
        policy: how it is held.
        say: prints a line, on rank 0.

    Attributes:
        fence: what the lease is recognised by, on every rank.
    """

    fence: Fence

    def __init__(
        self,
        save_folder: str,
        work_dir: Path,
        world: World,
        policy: LeasePolicy,
        say: Callable[[str], None],
    ) -> None:
        self._save_folder, self._work_dir, self._say = save_folder, work_dir, say
        self._world, self._policy = world, policy
        self._stack = contextlib.ExitStack()
        self._leases: list[Lease] = []

    def __enter__(self) -> RunLock:
        self.fence = self._world.on_main(self._take)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @property
    def lost(self) -> bool:
        """Whether this rank knows that the folder was taken over."""
        return any(lease.lost for lease in self._leases)

    def check(self) -> None:
        """Make sure that the folder is still ours; every rank calls it.

        Raises:
            LeaseLostError: another run has taken it over, the same error on every rank.
        """
        self._world.on_main(self._check)

    def _check(self) -> None:
        for lease in self._leases:
            lease.check()

    def _take(self) -> Fence:
        policy, self._leases = self._policy, []
        refuse_taken(self._save_folder)
        with self._stack:  # gives the first back where the second is refused
            for store, prefix in self._places():
                self._leases.append(
                    self._stack.enter_context(
                        exclusive(
                            store,
                            prefix=prefix,
                            keep=True,
                            busy=BUSY,
                            fix=FIX,
                            note=self._say,
                            takeover=policy.takeover_seconds,
                            single_writer="trainer.single_writer: true",
                        )
                    )
                )
            self._stack = self._stack.pop_all()
        return self._leases[0].fence

    def _places(self) -> list[tuple[Store, str]]:
        """Return the folders to hold, the save folder first."""
        run = Store(self._save_folder, single_writer=self._policy.single_writer)
        if not run.remote and os.path.realpath(run.root) == os.path.realpath(self._work_dir):
            return [(run, LEASE)]
        return [(run, LEASE), (Store(self._work_dir), f".{LEASE}")]
