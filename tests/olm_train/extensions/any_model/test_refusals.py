"""What `BasicTrainModule` cannot train: no loss, no values, nothing to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.own_data import Own
from torch import nn

from olm_data.errors import UsageError
from olm_train import BasicTrainModule, Duration, Trainer
from olm_train.checkpoint.tensors import Box, TensorsFile


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
        start = file.add(values)
    found = np.fromfile(tmp_path / "tensors", np.complex64, offset=start)
    assert found.tolist() == values.tolist()


def loss_of_images(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.mean((1, 2)), labels)
