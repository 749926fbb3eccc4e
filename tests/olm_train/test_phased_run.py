"""A run over a change of sequence length, dry; trained and resumed: test_revised_run.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import MANIFEST, config_values
from support.stand_in import parse_mixture

from olm_data.config.values import Values
from olm_data.mixture.mix import MixPlan, open_sources
from olm_train.estimate.flops import num_flops_per_token
from olm_train.run.config import RunConfig
from olm_train.run.dry_run import describe


@pytest.fixture(scope="module")
def lock(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny mixture, its first stage of 16 steps cut into rows of 8 tokens."""
    text = MANIFEST.replace("name: main,", "name: main, sequence_length: 8,")
    folder = tiny_mixture.parent
    mixture = parse_mixture(text, str(folder / "phases.yaml"), str(folder))
    path = folder / "phases.lock.json"
    MixPlan(mixture, open_sources(mixture), str(folder)).compile().write(path)
    return path


def test_a_dry_run_lists_the_steps_of_each_length_and_counts_their_work(
    lock: Path, tmp_path: Path
) -> None:
    config = RunConfig.resolve(Values(config_values(lock, tmp_path / "run")))
    text = describe(config, world_size=2)
    assert "steps 1 to 16: sequence length 8, micro-batches of 16 rows" in text
    assert "steps 17 to 24: sequence length 32, micro-batches of 4 rows" in text
    assert "128 rows, each as 4 of 8 tokens" in text
    pairs = (16 * 9 / 2 + 8 * 33 / 2) / 24
    flops = num_flops_per_token(config.model, pairs_per_token=pairs)
    assert f"{flops:.3e} FLOPs a token" in text
