"""Parametrizations and mixtures of experts in an export: other weights, the same logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.hf_exports import OLMOE, QWEN3_MOE, receipt_of, trained
from support.model_options import CONFIG, FAMILIES

from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.portable import evaluation_model
from olm_train.extensions.hf.model_format import load_model
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


pytestmark = pytest.mark.xdist_group("transformers")

KINDS = {"OlmoeForCausalLM": OLMOE, "Qwen3MoeForCausalLM": QWEN3_MOE}


@pytest.fixture(scope="module", params=KINDS)
def run(
    request: pytest.FixtureRequest, tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("experts")
    return request.param, trained(tiny_mixture, folder / "run", KINDS[request.param])


@torch.no_grad()
def test_transformers_computes_the_same_and_the_folder_comes_back_bit_for_bit(
    run: tuple[str, Checkpoint], tmp_path: Path
) -> None:
    architecture, checkpoint = run
    options = ExportOptions(dtype="float32", shard_bytes=30_000, check="transformers")
    export(checkpoint, str(tmp_path / "out"), options)
    receipt = receipt_of(tmp_path / "out")
    assert receipt.model_class == architecture
    assert receipt.verified.model is not None
    assert receipt.verified.model.loss is not None
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    names = [name for file in files for name in load_file(tmp_path / "out" / file)]
    assert sorted(names) == sorted(index["weight_map"])
    ours, found = evaluation_model(checkpoint), load_model(tmp_path / "out")
    again = found[0] if isinstance(found, tuple) else found
    values = dict(again.named_parameters())
    for name, value in ours.named_parameters():
        assert torch.equal(value[: len(values[name])], values[name]), name
        assert not value[len(values[name]) :].any()
