"""Mixtures of experts of a run as folders of transformers, and back: nothing of them is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.hf_exports import OLMOE, QWEN3_MOE, receipt_of, trained

from olm_data.errors import UsageError
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.portable import evaluation_model
from olm_train.extensions.hf.model_format import load_model
from olm_train.extensions.hf_export.export import export
from olm_train.extensions.hf_export.job import ExportOptions

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


def test_a_bias_for_balance_is_refused_by_name_before_anything_is_written(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    model = OLMOE.replace("name: aux", "name: bias")
    checkpoint = trained(tiny_mixture, tmp_path / "run", model)
    with pytest.raises(UsageError, match=r"feed_forward\.balance is bias"):
        export(checkpoint, str(tmp_path / "out"), ExportOptions(check="files"))
    assert not (tmp_path / "out").exists()
