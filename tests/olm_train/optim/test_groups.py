"""Parameter groups: matrices decay, and every parameter is claimed exactly once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from olm_data.errors import UsageError
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.optim.groups import GroupOptions, GroupOverride, check_claims, parameter_groups

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


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda names: names[1:], "claimed by no group"),
        (lambda names: [*names, names[0]], "claimed more than once"),
        (lambda names: [*names, "blocks.9.x"], "not a trainable parameter"),
    ],
)
def test_a_parameter_claimed_by_none_or_twice_is_named(edit, message: str) -> None:  # type: ignore[no-untyped-def]
    model = Decoder(CONFIG, device="meta")
    names = [name for name, _ in model.named_parameters()]
    check_claims(model, [{"names": names}])
    with pytest.raises(ValueError, match=message):
        check_claims(model, [{"names": edit(names)}])


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
