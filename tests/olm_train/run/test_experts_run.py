"""A mixture of experts from the command line to a folder of weights, killed on the way."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from support.runs import build_trainer, config_values, metrics, run, run_until, same_bits, tensors

from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.portable import evaluation_model, export
from olm_train.distributed.world import World
from olm_train.extensions.generate.command import main as generate
from olm_train.model.load import load_saved

LAST = "step00000012"


def written(lock: Path, folder: Path) -> Path:
    values = config_values(lock, folder / "run")
    values["model"] = {"preset": "olm-moe-4m", "n_layers": 2, "d_model": 32, "head_dim": 16}
    values["trainer"] |= {"hard_stop": {"value": 12, "unit": "steps"}}
    values["trainer"]["callbacks"]["ema"] = {"decay": 0.5}
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.fixture(scope="module")
def whole(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    result = run(written(tiny_mixture, folder))
    assert result.returncode == 0, result.stderr
    return folder / "run"


def test_metrics_say_who_got_the_tokens(whole: Path) -> None:
    steps = [line for line in metrics(whole) if "experts/load entropy" in line.get("metrics", line)]
    assert len(steps) == 12
    found = steps[-1].get("metrics", steps[-1])
    assert found["experts/load max over mean"] >= 1
    assert 0 < found["experts/load entropy"] <= 1
    assert found["experts/bias norm"] > 0


def test_killed_it_goes_on_with_the_same_bits(
    whole: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    config = written(tiny_mixture, tmp_path)
    code, _ = run_until("step  8/", signal.SIGKILL, config)
    assert code == -signal.SIGKILL
    result = run(config)
    assert result.returncode == 0, result.stderr
    assert metrics(tmp_path / "run") == metrics(whole)

    def state(folder: Path) -> dict[str, torch.Tensor]:
        shape = "--model={preset: olm-moe-4m, n_layers: 2, d_model: 32, head_dim: 16}"
        return tensors(lambda: build_trainer(tiny_mixture, folder, shape), folder / LAST)

    ours = state(tmp_path / "run")
    assert any(name.endswith("router.bias") for name in ours)
    assert same_bits(ours, state(whole))


def test_weights_and_averages_have_the_biases_and_write_text(whole: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(whole / LAST, World())
    model = evaluation_model(checkpoint)
    bias = model.blocks[0].feed_forward.router.bias
    assert bias is not None
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


def test_a_dry_run_says_how_many_parameters_a_token_passes(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    result = run(written(tiny_mixture, tmp_path), "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "parameters that a token passes" in result.stdout + result.stderr
