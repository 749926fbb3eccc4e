"""A mixture of experts from the command line to a folder of weights, stopped on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.runs import (
    build_trainer,
    config_values,
    metrics,
    same_bits,
    steps_of,
    tensors,
)

from olm_data.config.values import Values
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.portable import evaluation_model, export
from olm_train.distributed.world import World
from olm_train.extensions.generate.command import main as generate
from olm_train.model.load import load_saved
from olm_train.run.config import RunConfig
from olm_train.run.dry_run import describe

LAST = "step00000012"
OPTIONS = (
    "--model={preset: olm-moe-4m, n_layers: 2, d_model: 32, head_dim: 16}",
    "--trainer.callbacks.ema={decay: 0.5}",
)


@pytest.fixture(scope="module")
def whole(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    build_trainer(tiny_mixture, folder / "run", *OPTIONS, stop=12).fit()
    return folder / "run"


def test_metrics_say_who_got_the_tokens(whole: Path) -> None:
    steps = [line for line in metrics(whole) if "experts/load entropy" in line.get("metrics", line)]
    assert len(steps) == 12
    found = steps[-1].get("metrics", steps[-1])
    assert found["experts/load max over mean"] >= 1
    assert 0 < found["experts/load entropy"] <= 1
    assert found["experts/bias norm"] > 0


def assert_the_same(lock: Path, run: Path, whole: Path) -> None:
    one, other = (steps_of(folder) for folder in (run, whole))
    assert one == other
    ours, theirs = (
        tensors(lambda: build_trainer(lock, run, *OPTIONS), folder / LAST)
        for folder in (run, whole)
    )
    assert any(name.endswith("router.bias") for name in ours)
    assert same_bits(ours, theirs)


def test_stopped_it_goes_on_with_the_same_bits(
    whole: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    for steps in (6, 12):
        build_trainer(tiny_mixture, tmp_path / "run", *OPTIONS, stop=steps).fit()
    assert_the_same(tiny_mixture, tmp_path / "run", whole)


def test_weights_and_averages_have_the_biases_and_write_text(whole: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(whole / LAST, World())
    model = evaluation_model(checkpoint)
    bias = model.blocks[0].feed_forward.router.bias
    assert bias.abs().max() > 0
    average = evaluation_model(open_checkpoint(whole / f"{LAST}-ema", World()))
    assert average.blocks[0].feed_forward.router.bias.abs().max() > 0
    export(checkpoint, tmp_path / "weights")
    again = load_saved(tmp_path / "weights")
    again = again[0] if isinstance(again, tuple) else again
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    result = CliRunner().invoke(generate, [str(whole), "--max-new-tokens", "3"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("preset", "parameters", "active"),
    [
        ("olm-moe-4m", 3_417_216, 664_704),
        ("olmoe-1b-7b", 6_713_116_672, 1_075_972_096),
        ("qwen3-30b-a3b", 29_909_792_768, 2_730_702_848),
    ],
)
def test_a_dry_run_says_how_many_parameters_there_are_and_how_many_a_token_passes(
    preset: str, parameters: int, active: int, tiny_mixture: Path, tmp_path: Path
) -> None:
    values = Values(config_values(tiny_mixture, tmp_path / "run"))
    values.override(f"--model={{preset: {preset}}}")
    config = RunConfig.resolve(values)
    text = describe(config, 1)
    tables = config.model.head.tables() * config.model.vocab_size * config.model.d_model
    assert f"{parameters + tables:,} parameters, {parameters:,} without embeddings" in text
    assert f"{active + tables:,} parameters that a token passes" in text
