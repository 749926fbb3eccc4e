"""A folder that computes otherwise than the checkpoint is refused, whatever the difference is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hf_exports import OLMO2, trained

from olm_data.errors import ValidationError
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.portable import evaluation_model
from olm_train.extensions.hf_export.export import export
from olm_train.extensions.hf_export.job import ExportOptions
from olm_train.extensions.hf_export.verify import lengths_of, prove
from olm_train.model.config import DecoderConfig
from olm_train.model.rope import YaRNScaling

pytestmark = pytest.mark.xdist_group("export-verify")  # its fixtures are made once
SIZES: dict[str, Any] = {"vocab_size": 64, "d_model": 16, "n_layers": 2, "n_heads": 2}


@pytest.fixture(scope="module")
def checkpoint(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return trained(tiny_mixture, tmp_path_factory.mktemp("verify") / "run", OLMO2)


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    export(checkpoint, str(tmp_path / "hf"), ExportOptions(dtype="float32", check="files"))
    return tmp_path / "hf"


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def another_base(folder: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10_500.0}
    change(folder / "config.json", rope_parameters=rope, rope_theta=10_500.0)


def another_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"] *= 1.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def swapped_layers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    one, two = (f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1))
    tensors[one], tensors[two] = tensors[two], tensors[one]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def another_epsilon(folder: Path) -> None:
    change(folder / "config.json", rms_norm_eps=1e-3)


@pytest.mark.parametrize("spoil", [another_base, another_weight, swapped_layers, another_epsilon])
def test_other_logits_are_found(
    checkpoint: Checkpoint, folder: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(folder)
    with pytest.raises(ValidationError, match="gives logits that differ by"):
        prove(folder, evaluation_model(checkpoint), (0,), ())


def test_generation_that_does_not_stop_is_found(checkpoint: Checkpoint, folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[5])
    with pytest.raises(ValidationError, match=r"does not stop at the id 0|text ended early"):
        prove(folder, evaluation_model(checkpoint), (0,), ())


def test_another_loss_is_found(checkpoint: Checkpoint, folder: Path) -> None:
    ids = torch.arange(1, 9)
    good = (ids, torch.tensor([*range(2, 9), -100]), torch.tensor([0] * 4 + [4] * 4))
    model = evaluation_model(checkpoint)
    proof = prove(folder, model, (0,), [good])
    assert proof.loss is not None
    assert proof.loss.labels == 7
    assert proof.loss.ours == pytest.approx(proof.loss.theirs, abs=1e-6)
    forward = model.forward
    model.forward = lambda ids, **given: forward(ids, **{**given, "doc_start": None})  # type: ignore
    with pytest.raises(ValidationError, match="the loss of rows of the mixture is"):
        prove(folder, model, (0,), [good])


def test_prompts_are_longer_than_windows_and_the_context_before_scaling() -> None:
    plain = DecoderConfig(**SIZES)
    assert len(lengths_of(plain)) == 3
    windows = DecoderConfig(**SIZES, attention={"sliding_window": (100, 7)})
    assert len(lengths_of(windows)) == 3
    assert max(lengths_of(windows)) > 100
    scaled = DecoderConfig(
        **SIZES, positions={"scaling": YaRNScaling(factor=2.0, old_context_len=300)}
    )
    assert max(lengths_of(scaled)) > 300
    learned = DecoderConfig(**SIZES, positions={"name": "learned", "max_positions": 20})
    assert lengths_of(learned) == (17, 20)
