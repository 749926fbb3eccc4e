"""Any data loader as the data loader of a run: ours, one's own, or a plain one of PyTorch.

DataLoaderBase --its ranks are those of the run?--> as it is
DataLoader of torch --instances dealt to the ranks--> TorchDataLoader
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data import DataLoader as PlainLoader

from olm_data.errors import UsageError
from olm_train.callbacks.base import Callback
from olm_train.data.base import DataLoaderBase
from olm_train.data.batch import Batch
from olm_train.data.loader import DataLoader
from olm_train.distributed.world import World
from olm_train.extensions.any_model.torch_loader import TorchDataLoader

AnyLoader = DataLoaderBase | PlainLoader[Any]
"""What has the form of a plain loader, such as torchdata's, is one."""


def loader_of(
    given: AnyLoader, world: World, *, accumulate: int | None = None, seed: int = 0
) -> DataLoaderBase:
    """Return the data loader of a run.

    Args:
        accumulate: micro-batches of a step; None: one, or what a loader of ours says.

    Raises:
        UsageError: it is made for other ranks, or takes another number of micro-batches a step.
    """
    if not isinstance(given, DataLoaderBase):
        if not all(hasattr(given, name) for name in ("__iter__", "batch_size")):
            raise UsageError(
                f"a {type(given).__name__} is no data loader",
                where="dataloader",
                fix="give torch.utils.data.DataLoader(data, batch_size=...), or what derives from "
                "olm_train.DataLoaderBase",
            )
        count = 1 if accumulate is None else accumulate
        return TorchDataLoader(dealt(given, world, seed), world=world, accumulate=count, seed=seed)
    made_for = _ranks(given)
    if made_for is not None and made_for != (world.rank, world.size):
        raise UsageError(
            f"the data loader is made for rank {made_for[0]} of {made_for[1]}; this is rank "
            f"{world.rank} of {world.size}",
            where=type(given).__name__,
            why="tokens would be trained on twice, or left out",
            fix="start the world first, and give it to both: world = World.start(), "
            "DataLoader(..., rank=world.rank, world_size=world.size), AutoTrainer(..., "
            "world=world)",
        )
    own = micro_batches(given)
    if accumulate is not None and accumulate != own:
        raise UsageError(
            f"grad_accum_steps is {accumulate}; the data loader gives "
            f"{own or 'its own number of'} micro-batches a step",
            where="grad_accum_steps",
            fix="leave it out; the loader decides",
        )
    return given


def micro_batches(loader: DataLoaderBase) -> int | None:
    """Return the micro-batches of a rank in a step; None: not known."""
    if isinstance(loader, TorchDataLoader):
        return loader.accumulate
    if isinstance(loader, DataLoader):
        return loader.global_batch_size // (loader.rank_microbatch_size * loader.world_size)
    return None


def dealt(loader: PlainLoader[Any], world: World, seed: int) -> PlainLoader[Any]:
    """Return a loader that gives each rank its instances, where that is easily told.

    One without a sampler of its own would give every rank all of them: it gets a
    `DistributedSampler`, which is shuffled if it was. Others are left as they are.
    """
    sampler = getattr(loader, "sampler", None)
    ordinary = type(sampler) in (SequentialSampler, RandomSampler) and (
        type(getattr(loader, "batch_sampler", None)) is BatchSampler
    )
    if world.size == 1 or type(loader) is not PlainLoader or not ordinary:
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return loader
    if isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.generator is not None or sampler.num_samples != _size(loader)
    ):
        return loader
    share: DistributedSampler[Any] = DistributedSampler(
        loader.dataset,
        num_replicas=world.size,
        rank=world.rank,
        shuffle=isinstance(sampler, RandomSampler),
        seed=seed,
        drop_last=loader.drop_last,
    )
    return PlainLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=share,
        **{name: getattr(loader, name) for name in _KEPT},
    )


_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "in_order"),
)
"""Options of a loader of torch that one made of it has too."""


def _size(loader: PlainLoader[Any]) -> int:
    return len(loader.dataset)  # type: ignore[arg-type]


def _ranks(loader: DataLoaderBase) -> tuple[int, int] | None:
    """Return rank and number of ranks that a loader is made for; None: not known."""
    if isinstance(loader, TorchDataLoader):
        return loader.world.rank, loader.world.size
    if isinstance(loader, DataLoader):
        return loader.rank, loader.world_size
    return None


@dataclass(kw_only=True)
class RowLength(Callback):
    """Refuses rows of another length than the run was planned for.

    Attributes:
        context_length: tokens of a row, at most.
    """

    context_length: int

    def pre_step(self, batches: Sequence[Any]) -> None:
        for batch in batches:
            found = _length(batch)
            if found is not None and found > self.context_length:
                raise UsageError(
                    f"the data loader gave rows of {found:,} tokens; context_length is "
                    f"{self.context_length:,}",
                    where="context_length",
                    why="memory was planned for shorter rows",
                    fix="give both the same",
                )


def _length(batch: Any) -> int | None:
    """Return the tokens of a row of a batch; None: it has no rows of tokens."""
    if isinstance(batch, Batch):
        return batch.max_seqlen
    parts = [batch] if isinstance(batch, Tensor) else batch
    parts = parts.values() if isinstance(parts, dict) else parts
    first = next((part for part in parts if isinstance(part, Tensor)), None)
    if first is None or first.ndim != 2 or first.is_floating_point():
        return None
    return first.shape[1]
