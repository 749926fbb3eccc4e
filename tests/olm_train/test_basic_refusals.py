"""What `BasicTrainModule` cannot train: no loss, no values, nothing to train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from olm_data.errors import UsageError
from olm_train import BasicTrainModule


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
