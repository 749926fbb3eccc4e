"""Parameter groups: matrices decay, and every parameter is claimed exactly once."""

from __future__ import annotations

import pytest
import torch

from olm_train.model.decoder import DecoderConfig
from olm_train.optim.groups import check_claims, decay_groups

CONFIG = DecoderConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=4, qk_norm=True)


def decaying(model: torch.nn.Module, *, decay_embeddings: bool) -> set[str]:
    groups = decay_groups(model, weight_decay=0.1, decay_embeddings=decay_embeddings)
    claimed = [name for group in groups for name in group["names"]]
    assert sorted(claimed) == sorted(name for name, _ in model.named_parameters())
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}
    return {name for group in groups if group["weight_decay"] for name in group["names"]}


def test_matrices_decay_and_norms_and_embeddings_do_not() -> None:
    model = CONFIG.build(device="meta")
    names = decaying(model, decay_embeddings=False)
    expected = {name for name, p in model.named_parameters() if p.ndim == 2}
    assert names == expected - {"embeddings.weight"}
    assert "lm_head.weight" in names


def test_embeddings_decay_where_asked() -> None:
    model = CONFIG.build(device="meta")
    both = decaying(model, decay_embeddings=True)
    assert both - decaying(model, decay_embeddings=False) == {"embeddings.weight"}


def test_a_frozen_parameter_is_in_no_group() -> None:
    model = CONFIG.build(device="meta")
    model.embeddings.weight.requires_grad_(False)
    groups = decay_groups(model, weight_decay=0.1, decay_embeddings=True)
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
    model = CONFIG.build(device="meta")
    names = [name for name, _ in model.named_parameters()]
    check_claims(model, [{"names": names}])
    with pytest.raises(ValueError, match=message):
        check_claims(model, [{"names": edit(names)}])
