"""A parametrization is folded into the weights of an export: other weights, the same logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_exports import receipt_of, trained
from support.model_options import CONFIG, FAMILIES

from olm_train.extensions.hf_export.export import export
from olm_train.extensions.hf_export.fold import Fold, folded
from olm_train.extensions.hf_export.job import ExportOptions
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.model.parametrization import TABLES, BaseConfig

BASE = BaseConfig(d_model=12, n_layers=3)
"""No ratio is a power of two."""
GEMMA = FAMILIES["Gemma 2"]
SHAPES: dict[str, dict[str, Any]] = FAMILIES | {
    "plain": {"attention": {"qk_norm": None}, "n_kv_heads": None},
    "normed queries": {},
    "biases": {"attention": {"bias": "all", "qk_norm": None}, "feed_forward": {"bias": True}},
    "Gemma 2": {**GEMMA, "attention": {**GEMMA["attention"], "query_pre_attn_scalar": None}},
    "Gemma 3": {**FAMILIES["Gemma 3"], "attention": {"sliding_window": (4, -1)}},
}


def scaled(change: dict[str, Any], name: Any) -> DecoderConfig:
    return replace(CONFIG.changed(**change), parametrization=name, base=BASE)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in TABLES if name != "sp"])
@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES)
def test_folded_weights_give_the_same_logits(change: dict[str, Any], name: Any) -> None:
    config = scaled(change, name)
    model = Decoder(config).eval()
    init_parameters(model, 1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():  # gains and biases that are not all alike
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    ids = torch.randint(config.vocab_size, (2, 40), generator=generator)
    found, wanted = Fold(config).model(model), model(ids)
    assert found.config == folded(config)
    torch.testing.assert_close(found(ids), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())
    plain = Decoder(folded(config)).eval()
    plain.load_state_dict(model.state_dict())
    assert (plain(ids) - wanted).abs().max() > 0.01 * wanted.abs().max()  # it was for something


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_computes_what_the_run_did(
    tiny_mixture: Path, tmp_path: Path, dtype: Any
) -> None:
    """`export` compares logits, text and loss by itself."""
    model = (
        "d_model: 24, n_layers: 4, n_heads: 4, n_kv_heads: 2, init_std: 0.2, "
        "parametrization: completep, base: {d_model: 16, n_layers: 3}"
    )
    checkpoint = trained(tiny_mixture, tmp_path / "run", model)
    export(checkpoint, str(tmp_path / "out"), ExportOptions(dtype=dtype, check="transformers"))
    receipt = receipt_of(tmp_path / "out")
    assert receipt.model_class == "LlamaForCausalLM"
    assert receipt.verified.model is not None
    assert receipt.verified.model.largest_difference < 1e-5 * max(
        1.0, receipt.verified.model.largest_logit
    )
