"""Are tensors that several ranks hold the same on all of them? Compared now and then, bit by bit.

    weights, optimiser state -> sum of their bits, on the device -> [tensors] int64 -> all ranks
       -> ranks that hold the same piece of a tensor agree | the odd ones are named, the run ends

With DDP every rank holds everything; with HSDP a replica is one of several; with FSDP no sharded
weight is held twice. A changed bit changes the sum; that changes cancel out is as good as
impossible. Cost: one pass over the tensors and one wait for the device each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from olm_data.config.hints import PositiveInt
from olm_data.errors import ValidationError
from olm_train.callbacks.base import Callback

Piece = tuple[tuple[int, ...], int]
"""(which piece of a tensor, by its place along each sharded axis of the mesh; sum of its bits)."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_SHOWN = 3


@dataclass(kw_only=True)
class ReplicaCheckerCallback(Callback):
    """Compares what several ranks hold.

    Runs before the checkpointer: no difference is saved.

    Attributes:
        enabled: compare, where `replica_checker` is given at all, tensors that several ranks hold
            (DDP, HSDP), bit by bit, before the checkpointer saves them.
        interval: steps between comparisons; each is one pass over weights and optimiser state and
            one wait for the device.
    """

    priority: ClassVar[int] = 4

    enabled: bool = True
    interval: PositiveInt = 1000

    def post_step(self) -> None:
        trainer = self.trainer
        if trainer.step % self.interval or trainer.world.size == 1:
            return
        tensors = {
            name: tensor
            for part in trainer.train_module.state_dict().values()
            for name, tensor in part.items()
        }
        problems = odd_ranks(trainer.world.gather(digests(tensors)))
        if problems:
            rest = f" and {len(problems) - MOST_SHOWN:,} more" if len(problems) > MOST_SHOWN else ""
            raise ValidationError(
                f"step {trainer.step:,}: ranks that should hold the same tensors do not: "
                f"{'; '.join(problems[:MOST_SHOWN])}{rest}",
                why="a device computed or received something wrong; training on would mix it in",
                fix="take the machine of the rank out, and run the same command again: it goes on "
                "from the newest checkpoint, which is older than this",
            )


@torch.no_grad()
def digests(tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
    """Return which piece of each tensor this rank holds, and the sum of its bits as integers."""
    places, sums = {}, []
    for name, tensor in tensors.items():
        place: tuple[int, ...] = ()
        if isinstance(tensor, DTensor):
            coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or []
            pairs = zip(coordinate, tensor.placements, strict=True)
            place = tuple(at for at, placement in pairs if not placement.is_replicate())
            tensor = tensor.to_local()
        places[name] = place
        bits = tensor.contiguous().view(BITS[tensor.element_size()])
        sums.append(bits.sum(dtype=torch.int64))
    devices = {total.device for total in sums}
    values: dict[int, int] = {}
    for device in devices:  # one wait for each
        found = [i for i, total in enumerate(sums) if total.device == device]
        values |= dict(zip(found, torch.stack([sums[i] for i in found]).tolist(), strict=True))
    return {name: (place, values[i]) for i, (name, place) in enumerate(places.items())}


def odd_ranks(all_ranks: Sequence[Mapping[str, Piece]]) -> list[str]:
    """Return one line for each tensor that differs: the ranks that are not as most of them are.

    Args:
        all_ranks: `digests` of each rank, by rank.
    """
    problems = []
    for name in dict.fromkeys(name for found in all_ranks for name in found):
        holders: dict[tuple[int, ...], dict[int, int]] = {}
        for rank, found in enumerate(all_ranks):
            if name in found:  # or in another stage of a pipeline
                place, total = found[name]
                holders.setdefault(place, {})[rank] = total
        for totals in holders.values():
            (usual, most), *others = Counter(totals.values()).most_common()
            if not others:
                continue
            odd = [rank for rank, total in totals.items() if total != usual]
            if most == others[0][1]:  # no majority: nobody can say who is right
                odd = list(totals)
            ranks = ", ".join(str(rank) for rank in odd)
            same = "differ" if most == others[0][1] else "differ from the others"
            problems.append(f"{name}: rank{'s' * (len(odd) > 1)} {ranks} {same}")
    return problems
