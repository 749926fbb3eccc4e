"""A mistake has the same words in a manifest and in train.yaml: golden messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.stand_in import MANIFEST, parse_mixture

from olm_data.config.convert import parse
from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_train.run.config import RunConfig

TRAIN = """\
model: {d_model: 16, n_layers: 2, n_heads: 2, vocab_size: 64}
data_loader:
  mixture: mix.lock.json
  global_batch_size: 64
train_module:
  rank_microbatch_size: 64
  dp_config: {name: fsdp}
trainer: {save_folder: run}
"""


def of_mixture(old: str, new: str) -> list[str]:
    assert old in MANIFEST
    with pytest.raises(UsageError) as error:
        parse_mixture(MANIFEST.replace(old, new))
    return str(error.value).splitlines()


def of_training(folder: Path, old: str, new: str) -> list[str]:
    assert old in TRAIN
    file = folder / "train.yaml"
    file.write_text(TRAIN.replace(old, new))
    with pytest.raises(UsageError) as error:
        parse(RunConfig, Values.read(file))
    return str(error.value).replace(f"{folder}/", "").splitlines()


def test_an_unknown_field(tmp_path: Path) -> None:
    assert of_mixture("max_epochs: 4", "max_epoch: 4") == [
        "unknown field sources.web.max_epoch",
        "  where: manifest.yaml:6",
        "  fix: did you mean 'max_epochs'?",
    ]
    assert of_training(tmp_path, "n_heads", "n_head") == [
        "unknown field model.n_head",
        "  where: train.yaml:1",
        "  fix: did you mean 'n_heads'?",
    ]


def test_a_value_of_another_type(tmp_path: Path) -> None:
    assert of_mixture("sequence_length: 2048", "sequence_length: '2048'") == [
        "sequence_length is an integer, not '2048'",
        "  where: manifest.yaml:3",
        "  fix: write `sequence_length: 2048`",
    ]
    assert of_mixture("weights: {web: 85, code: 15}", "weights: {web: many, code: 15}") == [
        "stages[0].weights.web is a number, not 'many'",
        "  where: manifest.yaml:9",
    ]
    assert of_training(tmp_path, "global_batch_size: 64", "global_batch_size: many") == [
        "data_loader.global_batch_size is an integer, not 'many'",
        "  where: train.yaml:4",
    ]


def test_a_value_out_of_range(tmp_path: Path) -> None:
    assert of_mixture("max_epochs: 4", "max_epochs: 0") == [
        "sources.web.max_epochs is above 0, not 0",
        "  where: manifest.yaml:6",
    ]
    assert of_training(tmp_path, "{name: fsdp}", "{name: fsdp, prefetch_factor: -1}") == [
        "train_module.dp_config.prefetch_factor is at least 0, not -1",
        "  where: train.yaml:7",
    ]


def test_a_name_that_is_none_of_the_choices(tmp_path: Path) -> None:
    assert of_mixture("packing: concat", "packing: concta") == [
        "packing is one of concat, best_fit, document, not 'concta'",
        "  where: manifest.yaml:4",
        "  fix: did you mean 'concat'?",
    ]
    assert of_training(tmp_path, "{name: fsdp}", "{name: fdsp}") == [
        "train_module.dp_config.name is one of fsdp, hsdp, ddp, not 'fdsp'",
        "  where: train.yaml:7",
        "  fix: did you mean 'fsdp'?",
    ]


def test_a_field_that_is_missing(tmp_path: Path) -> None:
    assert of_mixture("sequence_length: 2048\n", "") == [
        "sequence_length is missing",
        "  where: manifest.yaml:1",
        "  fix: write `sequence_length: 2048`",
    ]
    assert of_training(tmp_path, "  global_batch_size: 64\n", "") == [
        "data_loader.global_batch_size is missing",
        "  where: train.yaml:2",
        "  fix: add `global_batch_size: ...` (an integer), or --data_loader.global_batch_size=... "
        "on the command line",
    ]


def test_fields_that_do_not_go_together(tmp_path: Path) -> None:
    assert of_training(tmp_path, "{name: fsdp}", "{name: ddp, cpu_offload: true}") == [
        "train_module.dp_config.cpu_offload: has no effect with name: ddp",
        "  where: train.yaml:7",
        "  fix: leave it out, or change the other one",
    ]
