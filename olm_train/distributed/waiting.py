"""How long ranks wait for each other, and what is said when one does not come.

    start: init_timeout (machines come up, weights load, blocks compile)
      -> first step done -> train_timeout --passed, or a connection broke--> RanksLostError
                                                      |
    store: "steps done" of each rank, "gave up" of each that timed out

A rank that gives up writes so; those that neither gave up nor finished within `GRACE` are the ones
that hang or died, and the message names them with the last step each rank did. Groups of the
exchanges around checkpoints keep the long wait: a save may take longer than many steps.

With nccl the host may stand in a kernel's wait; then torch's own watchdog ends the process after
the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

import torch.distributed as dist
from msgspec import Meta
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from olm_data.config.convert import Config
from olm_data.counts import spell_ranges
from olm_data.errors import ResourceError
from olm_train.distributed.world import World

GRACE = timedelta(seconds=10)
"""How long a rank that gave up waits for the others to say that they did so too."""


class RanksLostError(ResourceError):
    """Other ranks did not come to a collective in time, or their connection broke."""


Seconds = Annotated[float, Meta(gt=0, le=10**7)]


@dataclass(frozen=True, kw_only=True)
class CommConfig(Config):
    """How long a rank waits for the others before it gives up, in seconds.

    Attributes:
        init_timeout_seconds: how long a rank waits for the others until its first step is done,
            and around checkpoints at any time.
        train_timeout_seconds: how long it waits in the exchanges of later steps; then the run ends
            with a message that names the silent ranks and the last step each rank did.
    """

    init_timeout_seconds: Seconds = 1800.0
    train_timeout_seconds: Seconds = 600.0


class RankWatchdog:
    """Context manager around the steps of a run: turns a timeout into a message.

    Args:
        world: the ranks; without a store only the waits become short.
        model: its parameters lie over groups whose waits become short, too.
        timeout: seconds of a wait once the first step is done.
        grace: see `GRACE`.
    """

    def __init__(
        self, world: World, model: nn.Module, *, timeout: float, grace: timedelta = GRACE
    ) -> None:
        self._world, self._model = world, model
        self._timeout, self._grace = timedelta(seconds=timeout), grace
        self._short = world.size == 1

    def __enter__(self) -> RankWatchdog:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and self._world.size > 1 and broke_off(error):
            raise self._lost(error) from error

    def reached(self, step: int) -> None:
        """Say that this rank has done `step` steps; after the first of them waits become short."""
        if self._world.store is not None:
            self._world.store.set(_done(self._world.rank), str(step))
        if not self._short:
            for group in self._groups():
                # The only way to change it; torchtitan does the same.
                distributed_c10d._set_pg_timeout(self._timeout, group)
            self._short = True

    def _groups(self) -> Iterator[dist.ProcessGroup]:
        """Groups that carry the exchanges of a step, each once."""
        meshes = {p.device_mesh for p in self._model.parameters() if isinstance(p, DTensor)}
        groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        own = [dist.group.WORLD, self._world.control_group, *self._world.groups]
        yield from dict.fromkeys(group for group in [*own, *groups] if group is not None)

    def _lost(self, error: RuntimeError) -> RanksLostError:
        details: str | None = None
        if self._world.store is not None:
            with contextlib.suppress(dist.DistError):  # the store died with the rank that hosts it
                details = self._roll_call(self._world.store)
        timed_out = any(word in str(error).lower() for word in ("timed out", "timeout"))
        what = "timed out waiting for" if timed_out else "lost its connection to"
        return RanksLostError(
            f"rank {self._world.rank} {what} other ranks",
            where=details,
            why=str(error).strip().split("\n")[-1],
            fix="look at the messages of the ranks that are silent, and of their machines; the "
            "same command goes on from the newest checkpoint. Where a step, its data or an "
            "evaluation rightly takes longer, raise comm.train_timeout_seconds",
        )

    def _roll_call(self, store: dist.Store) -> str:
        """Return which ranks are silent, and the steps that ranks have done."""
        ranks = range(self._world.size)
        store.set(_gave_up(self._world.rank), "")
        with contextlib.suppress(dist.DistStoreError):
            store.wait([_gave_up(rank) for rank in ranks], self._grace)
        silent = [rank for rank in ranks if not store.check([_gave_up(rank)])]
        done: dict[str, list[int]] = {}
        for rank in ranks:
            key = _done(rank)
            step = bytes(store.get(key)).decode() if store.check([key]) else "no"
            done.setdefault(step, []).append(rank)
        parts = [f"silent: {numbers('rank', silent)}"] if silent else []
        parts += [f"{numbers('rank', who)}: {numbers_done(step)}" for step, who in done.items()]
        return "; ".join(parts)


def broke_off(error: RuntimeError) -> bool:
    """Whether an error tells of a collective that did not end well."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text


def numbers(word: str, them: list[int]) -> str:
    """Return "rank 3", or "ranks 0-2, 5" for ascending numbers."""
    return f"{word}{'s' if len(them) > 1 else ''} {spell_ranges(them, ', ')}"


def numbers_done(step: str) -> str:
    """Return "12 steps done"."""
    return f"{step} step{'' if step == '1' else 's'} done"


def _done(rank: int) -> str:
    return f"steps done/{rank}"


def _gave_up(rank: int) -> str:
    return f"gave up/{rank}"
