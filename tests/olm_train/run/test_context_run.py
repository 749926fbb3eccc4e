"""A run whose ranks share their rows: data, log and ledger of one rank; it goes on on any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
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
from olm_data.extensions.ledger.files import ledger_files, read_ledger
from olm_data.run_log.metric_names import CE_LOSS
from olm_train.run.config import RunConfig
from olm_train.run.dry_run import describe

pytestmark = [
    pytest.mark.xdist_group("context"),  # its fixtures are made once
    pytest.mark.slow,
]

CP = "--train_module.cp_config={degree: 2}"
BY_ROW = "--train_module.rank_microbatch_size=32"
"""A rank has a part of each row."""
LEDGER = "--trainer.callbacks.loss_ledger.enabled=true"


def stop(step: int) -> str:
    return f"--trainer.hard_stop={{value: {step}, unit: steps}}"


def train_rank(lock: Path, folder: Path) -> dict[str, str]:
    """All runs of one rank, and what was refused, by callback."""
    world = group_world()
    build_trainer(lock, folder / "shared", CP, BY_ROW, LEDGER, world=world).fit()
    for step in (6, STEPS):
        build_trainer(lock, folder / "in two", CP, BY_ROW, stop(step), world=world).fit()
    build_trainer(lock, folder / "from one", CP, BY_ROW, world=world).fit()
    build_trainer(lock, folder / "to one", CP, BY_ROW, stop(6), world=world).fit()
    refused = {}
    for name, option in (
        ("gradient_noise_scale", "enabled=true"),
        ("sequence_length_scheduler", "{truncate: true, min_sequence_length: 16, "
         "keep_multiple_of: 16, warmup_steps: 4}"),
    ):  # fmt: skip
        callback = f"--trainer.callbacks.{name}{'.' if '=' in option else '='}{option}"
        try:
            build_trainer(lock, folder / name, CP, BY_ROW, stop(2), callback, world=world).fit()
        except UsageError as error:
            refused[name] = str(error)
    shorter = "{min_sequence_length: 16, warmup_steps: 4}"
    option = f"--trainer.callbacks.sequence_length_scheduler={shorter}"
    needed = "--train_module.cp_config.exchange=needed"
    build_trainer(lock, folder / "shorter", CP, needed, BY_ROW, stop(6), option, world=world).fit()
    return refused


@pytest.fixture(scope="module")
def runs(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("context")
    build_trainer(tiny_mixture, folder / "alone", LEDGER).fit()
    build_trainer(tiny_mixture, folder / "from one", stop(6)).fit()
    shorter = "{min_sequence_length: 16, warmup_steps: 4}"
    option = f"--trainer.callbacks.sequence_length_scheduler={shorter}"
    build_trainer(tiny_mixture, folder / "shorter alone", stop(6), option).fit()
    refused, _ = run_ranks(train_rank, 2, tiny_mixture, folder)
    build_trainer(tiny_mixture, folder / "to one").fit()
    return {"folder": folder, "refused": refused}


def steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(folder) if "eval" not in line]


def close(one: Path, other: Path, count: int = STEPS) -> None:
    ours, theirs = steps(one), steps(other)
    assert [line["step"] for line in ours] == list(range(1, count + 1))
    for mine, its in zip(ours, theirs, strict=True):
        assert mine["order"] == its["order"]
        for name in ("train/tokens", "train/labels", "train/attention pairs"):
            assert mine[name] == its[name]
        assert mine[CE_LOSS] == pytest.approx(its[CE_LOSS], rel=1e-5)


def test_it_trains_on_the_rows_of_one_rank_with_its_losses(runs: dict[str, Any]) -> None:
    folder = runs["folder"]
    close(folder / "shared", folder / "alone")
    close(folder / "from one", folder / "alone")
    close(folder / "to one", folder / "alone")
    close(folder / "shorter", folder / "shorter alone", 6)
    ours, theirs = (
        [line for line in metrics(folder / name) if "eval" in line] for name in ("shared", "alone")
    )
    assert ours
    for mine, its in zip(ours, theirs, strict=True):
        assert mine["eval"].keys() == its["eval"].keys()
        for name, found in mine["eval"].items():
            assert found == pytest.approx(its["eval"][name], rel=1e-4)


def test_the_ledger_is_that_of_one_rank(runs: dict[str, Any]) -> None:
    def content(folder: Path) -> dict[Any, float]:
        lines = [line for _, table in read_ledger(folder) for line in table.to_pylist()]
        found = {tuple(v for k, v in line.items() if k != "nats"): line["nats"] for line in lines}
        assert len(found) == len(lines)
        return found

    ours, theirs = (content(runs["folder"] / name) for name in ("shared", "alone"))
    assert ours.keys() == theirs.keys()
    assert [ours[key] for key in theirs] == pytest.approx(list(theirs.values()), rel=1e-4)
    assert {file.rank for file in ledger_files(runs["folder"] / "shared")} == {0}


def test_it_goes_on_with_the_same_bits(runs: dict[str, Any], tiny_mixture: Path) -> None:
    folder = runs["folder"]
    assert steps(folder / "in two") == steps(folder / "shared")

    def state(name: str) -> dict[str, Any]:
        last = folder / name / f"step{STEPS:08}"
        return tensors(lambda: build_trainer(tiny_mixture, folder / "read"), last)

    assert same_bits(state("in two"), state("shared"))


def test_callbacks_that_need_whole_micro_batches_on_a_rank_are_refused(
    runs: dict[str, Any],
) -> None:
    assert "gradient of a whole micro-batch" in runs["refused"]["gradient_noise_scale"]
    assert "cannot be truncated" in runs["refused"]["sequence_length_scheduler"]


def test_a_dry_run_counts_readers(tiny_mixture: Path, tmp_path: Path) -> None:
    def said(*options: str, ranks: int = 4) -> str:
        values = Values(config_values(tiny_mixture, tmp_path))
        for option in options:
            values.override(option)
        return describe(RunConfig.resolve(values), ranks)

    size = "--data_loader.global_batch_size=512"
    assert "4 ranks, 2 to a micro-batch, x 2 micro-batches of 128 tokens" in said(size, CP)
    assert "4 ranks x 1 micro-batch of 128 tokens" in said(size)
    with pytest.raises(UsageError, match="on 2 times 2 ranks that share them"):
        said("--data_loader.global_batch_size=384", CP)
    with pytest.raises(UsageError, match="degree 2 does not divide the 3 ranks"):
        said(CP, ranks=3)
    with pytest.raises(UsageError, match="heads of keys"):
        said("--train_module.cp_config={degree: 4, exchange: ulysses}")
    assert "2 to a micro-batch" in said(size, CP, "--parallel=auto")
    needed = "--train_module.cp_config.exchange=needed"
    assert "if documents are as long as rows" in said(size, BY_ROW, CP, needed)
    assert "if documents are as long as rows" not in said(size, BY_ROW, CP)
