"""A run whose matrices are cut over ranks: log of one rank; it goes on, and is read, on any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import run_ranks
from support.runs import STEPS, build_trainer, group_world, metrics

from olm_data.errors import UsageError
from olm_data.run_log.metric_names import CE_LOSS, GRAD_NORM
from olm_train import load_model
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.portable import export
from olm_train.distributed.world import World

pytestmark = [
    pytest.mark.xdist_group("tensor"),  # its fixtures are made once
    pytest.mark.slow,
]

TP = "--train_module.tp_config={degree: 2}"
PADDED = "--model.vocab_multiple=64"
MEAN = "--trainer.callbacks.ema={decay: 0.9}"


def stop(step: int) -> str:
    return f"--trainer.hard_stop={{value: {step}, unit: steps}}"


def train_rank(lock: Path, folder: Path) -> list[str]:
    """All runs of one rank, and what was refused."""
    world = group_world()

    def fit(name: str, *options: str) -> None:
        build_trainer(lock, folder / name, PADDED, TP, *options, world=world).fit()

    fit("cut", MEAN)
    for step in (6, STEPS):
        fit("in two", MEAN, stop(step))
    fit("from one")
    fit("to one", stop(6))
    fit("watched", stop(4), "--trainer.callbacks.gap_monitor.enabled=true",
        "--trainer.callbacks.replica_checker.enabled=true")  # fmt: skip
    try:
        fit("noise", "--trainer.callbacks.gradient_noise_scale.enabled=true")
    except UsageError as error:
        return [str(error)]
    return []


@pytest.fixture(scope="module")
def runs(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tensor")
    build_trainer(tiny_mixture, folder / "alone", PADDED, MEAN).fit()
    build_trainer(tiny_mixture, folder / "from one", PADDED, stop(6)).fit()
    refused, _ = run_ranks(train_rank, 2, tiny_mixture, folder)
    build_trainer(tiny_mixture, folder / "to one", PADDED).fit()
    return {"folder": folder, "refused": refused}


def steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(folder) if "eval" not in line]


def test_its_log_is_that_of_one_rank(runs: dict[str, Any]) -> None:
    alone = steps(runs["folder"] / "alone")
    for name in ("cut", "from one", "to one"):
        for mine, its in zip(steps(runs["folder"] / name), alone, strict=True):
            assert mine["order"] == its["order"]
            assert mine[CE_LOSS] == pytest.approx(its[CE_LOSS], rel=1e-4)
            assert mine[GRAD_NORM] == pytest.approx(its[GRAD_NORM], rel=1e-3)
    ours, theirs = (
        [line["eval"] for line in metrics(runs["folder"] / name) if "eval" in line]
        for name in ("cut", "alone")
    )
    assert ours
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.keys() == its.keys()
        for name, found in mine.items():
            assert found == pytest.approx(its[name], rel=1e-3)


def test_it_goes_on_with_the_same_bits(runs: dict[str, Any]) -> None:
    assert steps(runs["folder"] / "in two") == steps(runs["folder"] / "cut")


@pytest.mark.parametrize("mean", ["", "-ema"])
def test_its_checkpoint_is_exported_as_any_other(
    runs: dict[str, Any], mean: str, tmp_path: Path
) -> None:
    for name in ("cut", "alone"):
        checkpoint = open_checkpoint(runs["folder"] / name / f"step{STEPS:08}{mean}", World())
        export(checkpoint, tmp_path / name)
    models: list[Any] = [load_model(tmp_path / name) for name in ("cut", "alone")]
    (cut, _), (alone, _) = models  # each with its tokenizer
    for (name, mine), its in zip(cut.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-2, atol=1e-3, msg=name)


def test_what_needs_whole_gradients_is_refused(runs: dict[str, Any]) -> None:
    assert "tp_config" in runs["refused"][0]
