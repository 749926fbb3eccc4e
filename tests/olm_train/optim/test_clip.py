"""Clipping: all together, and groups with a limit of their own by themselves."""

from __future__ import annotations

import torch

from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.optim.adamw import AdamWConfig
from olm_train.optim.clip import clip_gradients, total_norm
from olm_train.optim.groups import GroupOverride

CONFIG = DecoderConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=4)


def clipped(limit: float | None, *overrides: GroupOverride) -> dict[str, float]:
    """Norms of the gradients after clipping: of the embeddings, and of the rest."""
    model = Decoder(CONFIG)
    init_parameters(model, 0)
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
