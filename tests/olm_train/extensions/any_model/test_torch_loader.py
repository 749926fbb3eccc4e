"""Any data loader of torch over epochs and resumes; what of any model is gathered as a whole."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.distributed import run_ranks
from support.own_data import Images, Own, StatefulStream, Stream
from support.parallel_checks import Traffic
from support.runs import group_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from olm_data.errors import UsageError, ValidationError
from olm_train import BasicTrainModule, Duration, Trainer
from olm_train.checkpoint.state import from_json, to_json
from olm_train.checkpoint.tensors import Box, TensorsFile
from olm_train.distributed.world import World
from olm_train.extensions.any_model.torch_loader import TorchDataLoader, from_plain, to_plain
from olm_train.extensions.any_model.wrapping import units
from olm_train.parallel.apply import spread
from olm_train.parallel.config import DataParallelConfig

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


def model() -> nn.Sequential:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
    return nn.Sequential(nn.Embedding(10, 4), blocks, nn.MultiheadAttention(4, 2), nn.Linear(4, 1))


def names(whole: nn.Module, found: list[nn.Module]) -> list[str]:
    name_of = {module: name for name, module in whole.named_modules()}
    return [name_of[module] for module in found]


def test_by_class_inner_modules_come_first() -> None:
    whole = model()
    assert names(whole, units(whole)) == []
    assert names(whole, units(whole, [nn.Embedding])) == ["0"]
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert names(nested, units(nested, [nn.Sequential, nn.Linear])) == ["0.0", "0"]


def test_by_size_containers_and_parts_of_an_attention_are_no_units() -> None:
    whole = model()
    assert names(whole, units(whole, min_num_params=20)) == ["0", "1.0.0", "1.1.0", "2"]
    assert names(whole, units(whole, min_num_params=41)) == ["2"]
    assert names(whole, units(whole, min_num_params=10_000)) == []


def test_mistakes_are_refused_with_what_there_is() -> None:
    with pytest.raises(UsageError, match="no Conv1d inside it") as error:
        units(model(), [nn.Conv1d])
    assert "Embedding, Linear" in str(error.value)
    with pytest.raises(UsageError, match="wrap_classes and min_num_params"):
        units(model(), [nn.Linear], 3)


def _trained(factor: int) -> tuple[list[float], list[int]]:
    """On each rank: losses of three steps, and the gathers asked for before each block computes."""
    events: list[str] = []
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(8, 1))
    config = DataParallelConfig(param_dtype="float32", prefetch_factor=factor)
    module = spread(model, config, group_world(), units(model, [nn.Sequential]))
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: events.append("block"))
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for step in range(3):
        events.clear()
        with Traffic(events):
            loss = (module(torch.full((2, 8), 1.0 + step)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    computes = [n for n, event in enumerate(events) if event == "block"]
    return losses, [n - i for i, n in enumerate(computes)]


def _both() -> tuple[tuple[list[float], list[int]], tuple[list[float], list[int]]]:
    return _trained(0), _trained(2)


@pytest.mark.slow
def test_weights_of_ones_own_modules_are_asked_for_ahead_and_no_bit_changes() -> None:
    """A gather for the root, then for each of four blocks and for the part inside it."""
    for (losses, asked), (same, ahead) in run_ranks(_both, 2):
        assert losses == same
        assert losses[-1] < losses[0]
        assert asked == [2, 4, 6, 8]
        assert ahead == [4, 6, 7, 8]


def test_a_module_whose_weights_are_tied_to_others_is_no_unit() -> None:
    whole = model()
    whole[3] = nn.Linear(4, 10)
    whole[3].weight = whole[0].weight
    assert names(whole, units(whole, min_num_params=20)) == ["1.0.0", "1.1.0", "2"]
    assert names(whole, units(whole, [nn.Linear, nn.Embedding])) == ["2.out_proj", "1.1.0", "1.0.0"]
    inside = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    inside[1][1].weight = inside[1][0].weight
    assert names(inside, units(inside, min_num_params=10)) == ["1"]


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda out, labels: 3.0, "the loss returned a float"),
        (lambda out, labels: None, "the loss returned a NoneType"),
        (lambda out, labels: (out.mean(), 1), "the loss returned a tuple"),
        (lambda out, labels: labels.sum().long(), "the loss returned a int64"),
        (lambda out, labels: out.detach().mean(), "the loss has no gradient"),
        (nn.MSELoss(reduction="sum"), "reduction='sum'"),
        (nn.MSELoss, "the loss is the class MSELoss"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, what: str) -> None:
    def step() -> None:
        module = BasicTrainModule(nn.Linear(2, 1), torch.optim.SGD, loss, optim={"lr": 0.1})
        module.train_step([(torch.ones(3, 2), torch.ones(3, 1))], 1, 1)

    with pytest.raises(UsageError, match=what):
        step()


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (nn.Linear(2, 1).requires_grad_(False), "no parameter to train"),
        (nn.ReLU(), "no parameter to train"),
        (nn.Linear(2, 1, device="meta"), "no values yet"),
        (nn.LazyLinear(1), "no values yet"),
    ],
)
def test_what_is_no_model_to_train_is_refused(model: nn.Module, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        BasicTrainModule(model, torch.optim.SGD, nn.MSELoss(), optim={"lr": 0.1})


@pytest.mark.parametrize(
    "state",
    [
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros((1,) * 9),
        torch.zeros(1).expand(3),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)]),
    ],
)
def test_state_that_no_checkpoint_can_hold_is_refused_at_the_first_step(
    state: torch.Tensor, tmp_path: Path
) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["odd"] = state

    trainer = Trainer(
        train_module=BasicTrainModule(nn.Linear(4, 3), Odd, loss_of_images, optim={"lr": 0.1}),
        data_loader=Own(),
        save_folder=tmp_path,
        max_duration=Duration.steps(3),
    )
    with pytest.raises(UsageError, match=r"a checkpoint cannot hold '?optim\..*odd"):
        trainer.fit()
    assert trainer.step == 1


def test_a_conjugated_state_comes_back(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j]).conj()
    with TensorsFile(tmp_path / "tensors", [Box("x", values.dtype, (2,))]) as file:
        start = file.add(values).start
    found = np.fromfile(tmp_path / "tensors", np.complex64, offset=start)
    assert found.tolist() == values.tolist()


def loss_of_images(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.mean((1, 2)), labels)
