"""Fields of mixtures of experts: how many, which blocks have them, and what prevents one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from olm_data.errors import InputError, UsageError
from olm_train.extensions.hf.family import Family, canonical
from olm_train.extensions.hf.table import OLMOE, QWEN3_MOE, family_of_config
from olm_train.model.config import DecoderConfig
from olm_train.model.presets import preset

MIXTURE: dict[str, Any] = {
    "name": "moe", "n_experts": 6, "top_k": 2, "hidden_size": 24, "normalize_scores": True,
    "balance": None,
}  # fmt: skip


def shape(qk_norm: str, **options: Any) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=9, d_model=16, n_layers=4, n_heads=2, attention={"qk_norm": qk_norm},
        feed_forward=MIXTURE | options,
    )  # fmt: skip


def written(family: Family, config: DecoderConfig) -> dict[str, Any]:
    return {**family.config_to_hf(config, max_position_embeddings=64)}


def fields() -> dict[str, Any]:
    return written(QWEN3_MOE, shape("head"))


@pytest.mark.parametrize(("family", "qk_norm"), [(OLMOE, "full"), (QWEN3_MOE, "head")])
def test_it_is_written_and_comes_back(family: Family, qk_norm: str) -> None:
    config = shape(qk_norm)
    assert family_of_config(config) is family
    found = written(family, config)
    assert (found["num_experts"], found["num_experts_per_tok"]) == (6, 2)
    assert found["norm_topk_prob"] is True
    assert family.config_from_hf(found) == canonical(config)
    local = {name: value for name, value in found.items() if name != "num_experts"}
    assert family.config_from_hf(local | {"num_local_experts": 6}) == canonical(config)
    balanced = family.config_from_hf(
        found | {"router_aux_loss_coef": 0.5, "output_router_logits": True}
    )
    assert balanced == canonical(config)  # no logit depends on them


def test_a_loss_for_balance_and_a_capacity_are_not_of_the_model_a_bias_is() -> None:
    config = shape("full", balance={"name": "global_aux"}, z_loss=1e-3, capacity_factor=1.0)
    assert written(OLMOE, config) == written(OLMOE, shape("full"))
    with pytest.raises(UsageError, match=r"feed_forward\.balance is bias.*has a say in who"):
        written(OLMOE, shape("full", balance={"name": "bias"}))


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({"mlp_only_layers": [0, 1]}, 2),
        ({"mlp_only_layers": [1, 0], "decoder_sparse_step": 1}, 2),
        ({"mlp_only_layers": None}, 0),
        ({"mlp_only_layers": [0, 2], "decoder_sparse_step": 4}, 3),
    ],
)
def test_the_first_blocks_may_be_dense(given: dict[str, Any], first: int) -> None:
    found = QWEN3_MOE.config_from_hf(fields() | given | {"intermediate_size": 40}).feed_forward
    assert (found.first_dense, found.dense_hidden_size) == (first, 40 if first else None)


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        (QWEN3_MOE, {"mlp_only_layers": [1]}, "mlp_only_layers leaves other blocks"),
        (QWEN3_MOE, {"mlp_only_layers": [0, 1, 2, 3]}, "mlp_only_layers leaves other blocks"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step leaves other blocks"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN3_MOE, {"num_experts": 0}, "num_experts is at least 1"),
        (QWEN3_MOE, {"num_local_experts": 5}, "num_local_experts is 5, and num_experts is 6"),
        (QWEN3_MOE, {"num_experts_per_tok": 7}, "num_experts_per_tok.* 7 of 6 experts"),
        (QWEN3_MOE, {"moe_intermediate_size": 20}, "moe_intermediate_size: is no multiple of 8"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv is 8.0: queries, keys and values are not clipped"),
        (OLMOE, {"head_dim": 4}, "head_dim is 4"),
        (OLMOE, {"hidden_act": "gelu"}, "hidden_act is gelu"),
        (OLMOE, {"mlp_only_layers": [0]}, "mlp_only_layers is .*not known here"),
    ],
)
def test_what_would_change_a_logit_is_refused_by_name(
    family: Family, change: dict[str, Any], said: str
) -> None:
    config = shape("full" if family is OLMOE else "head")
    with pytest.raises(InputError, match=said):
        family.config_from_hf(written(family, config) | change)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scores": "sigmoid"}, "feed_forward.scores is sigmoid"),
        ({"score_scale": 2.0}, "feed_forward.score_scale is 2.0"),
        ({"shared_hidden_size": 8}, "feed_forward.shared_hidden_size is 8"),
        ({"first_dense": 1, "dense_hidden_size": 8}, "feed_forward.first_dense is 1"),
    ],
)
def test_what_a_family_lacks_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        written(OLMOE, shape("full", **options))


@pytest.mark.parametrize(("name", "family"), [("olmoe-1b-7b", OLMOE), ("qwen3-30b-a3b", QWEN3_MOE)])
def test_a_preset_is_of_its_family(name: str, family: Family) -> None:
    config = preset(name, vocab_size=9)
    assert family_of_config(config) is family
    assert family.config_from_hf(written(family, config)) == canonical(config)


def test_heads_of_olmoe_are_together_as_wide_as_the_model() -> None:
    with pytest.raises(UsageError, match="head_dim is 16"):
        written(OLMOE, replace(shape("full"), head_dim=16))
