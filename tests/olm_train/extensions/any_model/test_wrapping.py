"""Units of FSDP2 in any model, and what `BasicTrainModule` cannot train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.distributed import run_ranks
from support.own_data import Own
from support.parallel_checks import Traffic
from support.runs import group_world
from torch import nn

from olm_data.errors import UsageError
from olm_train import BasicTrainModule, Duration, Trainer
from olm_train.checkpoint.tensors import Box, TensorsFile
from olm_train.extensions.any_model.wrapping import units
from olm_train.parallel.apply import spread
from olm_train.parallel.config import DataParallelConfig


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
