"""A run whose experts are dealt to ranks: log of one rank; it goes on, and is read, on any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import run_ranks
from support.runs import (
    STEPS,
    build_trainer,
    config_values,
    group_world,
    metrics,
    same_bits,
    tensors,
)

from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_data.run_log.metric_names import CE_LOSS, GRAD_NORM
from olm_train import load_model
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.portable import export
from olm_train.distributed.world import World
from olm_train.estimate.sharding import Machine, candidates
from olm_train.parallel.config import DataParallelConfig
from olm_train.run.config import RunConfig
from olm_train.run.dry_run import describe

pytestmark = [
    pytest.mark.xdist_group("dealt"),  # its fixtures are made once
    pytest.mark.slow,
]

EP = "--train_module.ep_config={degree: 2}"
EXPERTS = (
    "--model.feed_forward={name: moe, n_experts: 4, top_k: 2, hidden_size: 16, "
    "balance: {name: bias, rate: 0.01}}"
)
MEAN = "--trainer.callbacks.ema={decay: 0.9}"


def stop(step: int) -> str:
    return f"--trainer.hard_stop={{value: {step}, unit: steps}}"


def train_rank(lock: Path, folder: Path) -> str:
    """All runs of one rank, and what was refused."""
    world = group_world()

    def fit(name: str, *options: str) -> None:
        build_trainer(lock, folder / name, EXPERTS, EP, *options, world=world).fit()

    fit("dealt", MEAN)
    for step in (6, STEPS):
        fit("in two", MEAN, stop(step))
    fit("from one")
    fit("to one", stop(6))
    fit("watched", stop(4), "--trainer.callbacks.gap_monitor.enabled=true",
        "--trainer.callbacks.replica_checker.enabled=true")  # fmt: skip
    try:
        fit("noise", "--trainer.callbacks.gradient_noise_scale.enabled=true")
    except UsageError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def runs(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("dealt")
    build_trainer(tiny_mixture, folder / "alone", EXPERTS, MEAN).fit()
    build_trainer(tiny_mixture, folder / "from one", EXPERTS, stop(6)).fit()
    refused, _ = run_ranks(train_rank, 2, tiny_mixture, folder)
    build_trainer(tiny_mixture, folder / "to one", EXPERTS).fit()
    return {"folder": folder, "refused": refused}


def steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(folder) if "eval" not in line]


def test_its_log_is_that_of_one_rank(runs: dict[str, Any]) -> None:
    alone = steps(runs["folder"] / "alone")
    for name in ("dealt", "from one", "to one"):
        for mine, its in zip(steps(runs["folder"] / name), alone, strict=True):
            assert mine["order"] == its["order"]
            assert mine[CE_LOSS] == pytest.approx(its[CE_LOSS], rel=1e-4)
            assert mine[GRAD_NORM] == pytest.approx(its[GRAD_NORM], rel=1e-3)
    ours, theirs = (
        [line["eval"] for line in metrics(runs["folder"] / name) if "eval" in line]
        for name in ("dealt", "alone")
    )
    assert ours
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.keys() == its.keys()
        for name, found in mine.items():
            assert found == pytest.approx(its[name], rel=1e-3)


def test_it_goes_on_with_the_same_bits(runs: dict[str, Any], tiny_mixture: Path) -> None:
    folder = runs["folder"]
    assert steps(folder / "in two") == steps(folder / "dealt")

    def state(name: str) -> dict[str, Any]:
        last = folder / name / f"step{STEPS:08}"
        found: dict[str, Any] = tensors(
            lambda: build_trainer(tiny_mixture, folder / "read", EXPERTS), last
        )
        return found

    assert same_bits(state("in two"), state("dealt"))


@pytest.mark.parametrize("mean", ["", "-ema"])
def test_its_checkpoint_is_exported_as_any_other(
    runs: dict[str, Any], mean: str, tmp_path: Path
) -> None:
    for name in ("dealt", "alone"):
        checkpoint = open_checkpoint(runs["folder"] / name / f"step{STEPS:08}{mean}", World())
        export(checkpoint, tmp_path / name)
    models: list[Any] = [load_model(tmp_path / name) for name in ("dealt", "alone")]
    (dealt, _), (alone, _) = models  # each with its tokenizer
    ids = torch.arange(8)[None]
    torch.testing.assert_close(dealt(ids), alone(ids), rtol=1e-3, atol=1e-4)


def test_what_needs_gradients_of_one_rank_is_refused(runs: dict[str, Any]) -> None:
    assert "with train_module.ep_config" in runs["refused"]
    assert len(steps(runs["folder"] / "watched")) == 4


def test_a_dry_run_knows_it(tiny_mixture: Path, tmp_path: Path) -> None:
    def said(*options: str, ranks: int = 2) -> str:
        values = Values(config_values(tiny_mixture, tmp_path))
        for option in options:
            values.override(option)
        return describe(RunConfig.resolve(values), ranks)

    assert "2 ranks, experts dealt to 2, x 1 micro-batch" in said(EXPERTS, EP)
    assert "experts dealt" not in said(EXPERTS)
    chosen = said(EXPERTS, EP, "--parallel=auto")
    assert "fsdp: cut over all ranks" in chosen
    assert "ddp: whole" not in chosen
    with pytest.raises(UsageError, match="degree 2 does not divide the 3 ranks"):
        said(EXPERTS, EP, ranks=3)
    with pytest.raises(UsageError, match="no experts to deal"):
        said(EP)


def test_copies_that_experts_cannot_be_dealt_in_are_no_candidates() -> None:
    machine = Machine(world_size=8, nodes=4, memory=1)

    def names(dealt: int) -> set[str]:
        return {
            str(config.name) for _, config in candidates(machine, DataParallelConfig(), dealt=dealt)
        }

    assert names(1) == {"ddp", "hsdp", "fsdp"}
    assert names(2) == {"hsdp", "fsdp"}
    assert names(4) == {"fsdp"}
