"""Files that transformers wrote once: whatever it becomes, they stay the same models to us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.frozen_hf_models import FROZEN, MODELS, TOKENS

from olm_train.extensions.hf.table import FAMILIES, family_of_hf
from olm_train.model.decoder import Decoder

LARGEST = 40_000  # bytes of a folder


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_each_family_has_one() -> None:
    assert set(MODELS) == {family.name for family in FAMILIES}
    for name in MODELS:
        files = list((FROZEN / name).iterdir())
        assert {path.name for path in files} == {
            "config.json",
            "expected.json",
            "model.safetensors",
        }
        assert sum(path.stat().st_size for path in files) < LARGEST


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_are_those_that_transformers_gave(name: str) -> None:
    folder = FROZEN / name
    fields, expected = read(folder, "config.json"), read(folder, "expected.json")
    tensors = load_file(folder / "model.safetensors")
    family = family_of_hf(fields)
    config = family.config_from_hf(fields)
    model, stored = Decoder(config), family.stored_names(config, tensors)
    parameters = dict(model.named_parameters())
    back = {}
    for each in family.tensors(config):
        target = parameters[each.ours].data
        each.fill(target, lambda theirs, block: tensors[stored[theirs]][block])
        back |= {part.name: part.of(target.bfloat16()[part.ours]) for part in each.parts}
    assert back.keys() == tensors.keys()
    assert all(torch.equal(value, back[key]) for key, value in tensors.items())
    logits = model(torch.tensor([expected["ids"]]))[0]
    assert logits.shape == (TOKENS, config.vocab_size)
    torch.testing.assert_close(logits, torch.tensor(expected["logits"]), atol=1e-5, rtol=1e-5)
