"""The folder of a model can be read by anybody, and says what wrote it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open

from olm_data.model_folder import read_about
from olm_data.storage.store import Store
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.model.weights_folder import load_exported

CONFIG = DecoderConfig(vocab_size=10, vocab_multiple=16, d_model=4, n_layers=1, n_heads=1)


def test_the_folder_is_safetensors_and_json(tmp_path: Path) -> None:
    model = Decoder(CONFIG, dtype=torch.float32)
    init_parameters(model, 0)
    model.save(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    data = (tmp_path / "model.safetensors").read_bytes()
    assert about["weights"] == {
        "file": "model.safetensors",
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    assert (about["format"], about["version"], about["carried"]) == ("olm-model", 3, [])
    assert about["model_class"] == "olm_train.model.decoder:Decoder"
    assert about["config_class"] == "olm_train.model.config:DecoderConfig"
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == dict(model.named_parameters()).keys()
        assert torch.equal(file.get_tensor("embeddings.weight"), model.embeddings.weight[:10])


def test_folders_of_earlier_versions_are_read(tmp_path: Path) -> None:
    Decoder(CONFIG, dtype=torch.float32).save(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    old = {k: v for k, v in about.items() if not k.endswith("_class")}
    old |= {"version": 2, "step": 7, "lock_digest": "a" * 64}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_about(Store(str(tmp_path))).step == 7
    assert load_exported(str(tmp_path)).about.model_class == "olm_train.model.decoder:Decoder"
