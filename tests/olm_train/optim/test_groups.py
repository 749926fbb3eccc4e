"""Which parameter has which options, its clipping, and optimisers that a program gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.auto_runs import decoder
from support.model_options import drawn
from torch import nn

from olm_data.config.convert import as_dict
from olm_data.errors import UsageError
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.optim.adamw import AdamWConfig
from olm_train.optim.clip import clip_gradients, total_norm
from olm_train.optim.given import built, given_optim
from olm_train.optim.groups import GroupOptions, GroupOverride, parameter_groups
from olm_train.optim.state import names_of

CONFIG = DecoderConfig(
    vocab_size=50, d_model=32, n_layers=2, n_heads=4, attention={"qk_norm": "head"}
)


def decaying(model: torch.nn.Module, *, decay_embeddings: bool) -> set[str]:
    groups = parameter_groups(model, weight_decay=0.1, decay_embeddings=decay_embeddings)
    claimed = [name for group in groups for name in group["names"]]
    assert sorted(claimed) == sorted(name for name, _ in model.named_parameters())
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}
    return {name for group in groups if group["weight_decay"] for name in group["names"]}


def test_matrices_decay_and_norms_and_embeddings_do_not() -> None:
    model = Decoder(CONFIG, device="meta")
    names = decaying(model, decay_embeddings=False)
    expected = {name for name, p in model.named_parameters() if p.ndim == 2}
    assert names == expected - {"embeddings.weight"}
    assert "lm_head.weight" in names


def test_embeddings_decay_where_asked() -> None:
    model = Decoder(CONFIG, device="meta")
    both = decaying(model, decay_embeddings=True)
    assert both - decaying(model, decay_embeddings=False) == {"embeddings.weight"}


def test_a_frozen_parameter_is_in_no_group() -> None:
    model = Decoder(CONFIG, device="meta")
    model.embeddings.weight.requires_grad_(False)
    groups = parameter_groups(model, weight_decay=0.1, decay_embeddings=True)
    assert "embeddings.weight" not in [name for group in groups for name in group["names"]]


def groups_of(*overrides: GroupOverride) -> list[dict]:  # type: ignore[type-arg]
    model = Decoder(CONFIG, device="meta")
    known = ("betas",)
    return parameter_groups(
        model, weight_decay=0.1, decay_embeddings=False, overrides=overrides, known=known
    )


def test_an_override_changes_its_parameters_and_keeps_what_it_does_not_name() -> None:
    opts: GroupOptions = {"lr": 1e-5, "betas": (0.8, 0.9)}
    groups = groups_of(GroupOverride(params=["blocks.0.*", "norm.weight"], opts=opts))
    special = [group for group in groups if "lr" in group]
    names = {name for group in special for name in group["names"]}
    assert all(name.startswith("blocks.0.") for name in names - {"norm.weight"})
    assert "blocks.0.attention.w_qkv.weight" in names
    for group in special:
        assert (group["lr"], group["betas"]) == (1e-5, (0.8, 0.9))
        matrices = ["norm" not in name for name in group["names"]]
        assert set(matrices) == {group["weight_decay"] == 0.1}
    assert not names & {n for group in groups if "lr" not in group for n in group["names"]}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([GroupOverride(params=["block.*"])], "no parameter is called 'block.\\*'"),
        (
            [GroupOverride(params=["blocks.*"]), GroupOverride(params=["*.w_qkv.weight"])],
            "claimed twice: by overrides 0 and 1",
        ),
        ([GroupOverride(params=["*"], opts={"momentum": 0.9})], "no option 'momentum'"),
        ([GroupOverride(params=["*"], opts={"betas": 0.9})], "out of range"),
    ],
    ids=str,
)
def test_an_override_that_does_not_fit_is_refused_by_name(
    overrides: list[GroupOverride], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        groups_of(*overrides)


@pytest.mark.parametrize(
    ("opts", "message"), [({"lr": -1}, "opts.lr is a number"), ({"betas": "no"}, "opts.betas is")]
)
def test_an_option_out_of_range_is_refused(opts: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GroupOverride(params=["*"], opts=opts)


TWO_BLOCKS = DecoderConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=4)


def clipped(limit: float | None, *overrides: GroupOverride) -> dict[str, float]:
    """Norms of the gradients after clipping: of the embeddings, and of the rest."""
    model = drawn(TWO_BLOCKS)
    optimizer = AdamWConfig(group_overrides=list(overrides)).build(model)
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
    clip_gradients(optimizer, total_norm(model.parameters()), limit)
    table = model.embeddings.weight
    rest = [p for p in model.parameters() if p is not table]
    return {"table": float(total_norm([table])), "rest": float(total_norm(rest))}


def test_all_are_clipped_together() -> None:
    free, both = clipped(None), clipped(1.0)
    assert abs(both["table"] ** 2 + both["rest"] ** 2 - 1) < 1e-4
    assert abs(both["table"] / both["rest"] - free["table"] / free["rest"]) < 1e-4


def test_a_group_with_a_limit_is_clipped_by_its_own_norm_and_counts_in_no_other() -> None:
    own = GroupOverride(params=["embeddings.weight"], opts={"max_grad_norm": 0.25})
    free, alone, with_all = clipped(None), clipped(None, own), clipped(1.0, own)
    assert abs(alone["table"] - 0.25) < 1e-4
    assert alone["rest"] == free["rest"]
    assert abs(with_all["table"] - 0.25) < 1e-4
    assert abs(with_all["rest"] - 1) < 1e-4


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
