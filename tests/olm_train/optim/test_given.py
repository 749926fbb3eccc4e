"""An optimiser given as a class or an instance, over parameters that may have been replaced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.auto_runs import decoder
from torch import nn

from olm_data.config.convert import as_dict
from olm_data.errors import UsageError
from olm_train.optim.given import built, given_optim
from olm_train.optim.state import names_of


def test_its_configuration_tells_what_it_is_and_builds_it() -> None:
    model = decoder()
    config = given_optim(torch.optim.AdamW, model, {"lr": 0.5, "weight_decay": 0.2})
    assert as_dict(config) == {
        "kind": "torch.optim.AdamW",
        "options": {"lr": 0.5, "weight_decay": 0.2},
        "lr": 0.5,
        "betas": [0.9, 0.999],
        "weight_decay": 0.2,
        "decay_embeddings": True,
        "group_overrides": [],
    }
    groups = config.build(model).param_groups
    assert [(g["weight_decay"], g["peak_lr"]) for g in groups] == [(0.2, 0.5), (0.0, 0.5)]
    assert given_optim(torch.optim.SGD, model, {"lr": 0.5}).betas == (0.0, 0.0)


def test_an_instance_goes_along_with_the_parameters_of_its_model() -> None:
    model = nn.Linear(2, 2)
    own = torch.optim.SGD([{"params": [model.bias], "lr": 0.1}, {"params": [model.weight]}], lr=0.2)
    config = given_optim(own, model, {})
    assert config.lr == 0.2
    model.to("meta")  # other parameters, by the same names
    assert config.build(model) is own
    assert [group["params"] for group in own.param_groups] == [[model.bias], [model.weight]]
    assert [group["peak_lr"] for group in own.param_groups] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda model: torch.optim.LBFGS, "needs no closure|calls the model itself"),
        (lambda model: torch.optim.SGD(copy.deepcopy(model).parameters()), "none of the model's"),
    ],
)
def test_what_cannot_be_one_is_refused(make: Any, what: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=what):
        built(make(model), model, {}, names_of(model))


def test_wrong_options_are_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"torch\.optim\.SGD does not take these options") as error:
        given_optim(torch.optim.SGD, model, {"lr": 0.1, "betas": (0.9, 0.9)})
    assert "betas" in (error.value.why or "")
