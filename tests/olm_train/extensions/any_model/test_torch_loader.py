"""A plain PyTorch DataLoader goes on with the very batches that would have come."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.own_data import Images, StatefulStream, Stream
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from olm_data.errors import UsageError, ValidationError
from olm_train.checkpoint.state import from_json, to_json
from olm_train.distributed.world import World
from olm_train.extensions.any_model.torch_loader import TorchDataLoader, from_plain, to_plain

STEPS = 8
Make = Callable[[], Any]


class Remembering(RandomSampler):
    """A sampler with a state: the order of the epoch and the place in it."""

    order: list[int] | None = None
    at = 0

    def __iter__(self) -> Iterator[int]:
        if self.order is None:
            self.order, self.at = list(super().__iter__()), 0
        while self.at < len(self.order):
            self.at += 1
            yield self.order[self.at - 1]
        self.order = None

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, tuple[Make, bool]] = {
    "shuffled": (lambda: DataLoader(Images(), 4, shuffle=True), False),
    "generator": (lambda: DataLoader(Images(), 4, shuffle=True, generator=seeded()), False),
    "workers": (lambda: DataLoader(Images(), 4, shuffle=True, num_workers=1), False),
    "stream": (lambda: DataLoader(Stream(), 4), False),
    "stateful stream": (lambda: DataLoader(StatefulStream(), 4), True),
    "stateful stream, whole batches": (lambda: DataLoader(StatefulStream(16), 4), True),
    "stateful sampler": (lambda: DataLoader(Images(), 4, sampler=Remembering(Images())), True),
    "torchdata": (lambda: StatefulDataLoader(Images(), 4, shuffle=True), True),
}


def take(items: Iterator[list[Any]], loader: TorchDataLoader, count: int) -> list[Any]:
    """Step, epoch and images of some steps; the model draws random numbers meanwhile."""
    taken = []
    for _ in range(count):
        torch.rand(3)
        step = next(items)
        taken.append((loader.step, loader.epoch, [(x.tolist(), y.tolist()) for x, y in step]))
    return taken


@pytest.mark.parametrize("name", LOADERS)
def test_it_goes_on_bit_for_bit_from_any_step(name: str) -> None:
    make, by_state = LOADERS[name]
    for stop in (1, 3, 4, 5) if name != "workers" else (3, 4):  # workers cost a second a start
        torch.manual_seed(7)
        first = TorchDataLoader(make(), accumulate=2)
        items = iter(first)
        take(items, first, stop)
        state = json.loads(json.dumps(to_json(first.state_dict(), "")))
        torch.manual_seed(stop)
        random.seed(stop)
        second = TorchDataLoader(make(), accumulate=2)
        second.load_state_dict(from_json(state, ""))
        assert second.resumes_by_state is by_state
        assert to_json(second.state_dict(), "") == state
        assert take(iter(second), second, STEPS - stop) == take(items, first, STEPS - stop)


def test_an_epoch_is_shuffled_anew_and_known_by_its_number() -> None:
    def orders(seed: int) -> list[list[int]]:
        loader = TorchDataLoader(DataLoader(range(21), 7, shuffle=True), seed=seed)  # type: ignore[arg-type]
        items = iter(loader)
        return [torch.cat([next(items)[0] for _ in range(3)]).tolist() for _ in range(2)]

    one, two = orders(1)
    assert sorted(one) == sorted(two) == list(range(21))
    assert one != two
    assert orders(1) == [one, two]
    assert orders(2)[0] != one


def test_batches_that_fill_no_step_are_told(caplog: pytest.LogCaptureFixture) -> None:
    loader = TorchDataLoader(DataLoader(range(10), 2), accumulate=2, epochs=2)  # type: ignore[arg-type]
    assert (loader.steps, loader.global_batch_size) == (2, 4)
    assert [(loader.step, loader.epoch) for _ in loader] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert caplog.text.count("1 batches were left over, fewer than the 2 of a step") == 2


def test_making_batches_again_is_told(caplog: pytest.LogCaptureFixture) -> None:
    loader = TorchDataLoader(DataLoader(Images(), 4))
    take(iter(loader), loader, 3)
    TorchDataLoader(DataLoader(Images(), 4)).load_state_dict(loader.state_dict())
    assert "3 batches of epoch 1 are made again" in caplog.text


def test_a_state_that_the_loader_has_no_use_for_is_refused() -> None:
    loader = TorchDataLoader(DataLoader(StatefulStream(), 4))
    take(iter(loader), loader, 1)
    with pytest.raises(ValidationError, match="no use for"):
        TorchDataLoader(DataLoader(Stream(), 4)).load_state_dict(loader.state_dict())


def test_the_same_instances_on_each_rank_are_refused() -> None:
    world = World(rank=1, size=2)
    for shuffle in (False, True):
        with pytest.raises(UsageError, match="DistributedSampler"):
            TorchDataLoader(DataLoader(Images(), 4, shuffle=shuffle), world=world)
    dealt = []
    for rank in range(2):
        sampler: DistributedSampler[Any] = DistributedSampler(Images(), 2, rank)
        plain: DataLoader[Any] = DataLoader(range(21), 21, sampler=sampler)  # type: ignore[arg-type]
        loader = TorchDataLoader(plain, world=World(rank=rank, size=2))
        items = iter(loader)
        dealt.append([next(items)[0].tolist() for _ in range(2)])
    assert set(dealt[0][0]) | set(dealt[1][0]) == set(range(21))
    assert dealt[0][0] != dealt[0][1], "set_epoch shuffles anew"


def test_a_size_that_nobody_knows_is_asked_for() -> None:
    rows = torch.zeros(4, 2)
    plain: DataLoader[Tensor] = DataLoader(rows, batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="global_batch_size"):
        TorchDataLoader(plain)
    assert TorchDataLoader(plain, global_batch_size=1).tokens_before(3) == 3
    with pytest.raises(UsageError, match="accumulate is at least 1"):
        TorchDataLoader(plain, global_batch_size=1, accumulate=0)


def test_batches_at_the_end_of_an_epoch_are_known_before_it() -> None:
    def rest(count: int) -> str | None:
        return TorchDataLoader(DataLoader(range(count), 2), accumulate=3).left_over()  # type: ignore[arg-type]

    assert rest(12) is None
    assert rest(16) == "2 batches of each rank at the end of each epoch fill no step"
    assert TorchDataLoader(DataLoader(Stream(), 4)).left_over() is None


def through_json(value: Any) -> Any:
    return from_plain(from_json(json.loads(json.dumps(to_json(to_plain(value), "x"))), "x"))


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6, dtype=torch.int64).reshape(2, 3),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.empty(0, dtype=torch.float32),
        torch.Generator().manual_seed(3).get_state(),
    ],
)
def test_tensors_come_back(value: torch.Tensor) -> None:
    back = through_json({"a": [value]})["a"][0]
    assert back.dtype == value.dtype
    assert torch.equal(back, value)


def test_arrays_generators_and_odd_keys_come_back() -> None:
    state = {0: "a", (1, 2): [None, True], "n": np.int64(3), "python": random.Random(1).getstate()}
    assert through_json(state) == state
    array = np.arange(6, dtype=">i4").reshape(3, 2)
    assert (through_json([array])[0] == array).all()
    numpy: Any = np.random.RandomState(1).get_state(legacy=False)
    again = np.random.RandomState(2)
    again.set_state(through_json(numpy))
    assert again.randint(1 << 30) == np.random.RandomState(1).randint(1 << 30)


def test_what_only_a_pickle_could_bring_back_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"data_loader\.a"):
        to_json(to_plain({"a": {1, 2}}), "data_loader")
