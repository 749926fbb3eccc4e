"""A run that is killed, stopped, or moved to other ranks goes on as if nothing had happened.

Real processes on CPU in fp32: `python -m olm_train.run` and torchrun, real signals, real files.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import run_ranks
from support.runs import (
    STEPS,
    build_trainer,
    group_world,
    metrics,
    run,
    run_until,
    same_bits,
    tensors,
    write_config,
)

pytestmark = pytest.mark.xdist_group("resume")  # its fixtures are made once
LAST = f"step{STEPS:08d}"


@pytest.fixture(scope="module")
def undisturbed(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The save folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    result = run(write_config(folder / "train.yaml", tiny_mixture, folder / "run"))
    assert result.returncode == 0, result.stderr
    return folder / "run"


def final(lock: Path, save_folder: Path) -> dict[str, torch.Tensor]:
    return tensors(lambda: build_trainer(lock, save_folder), save_folder / LAST)


def without(lines: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in names} for line in lines]


def test_metrics_say_what_each_step_was_made_of(undisturbed: Path) -> None:
    steps = [line for line in metrics(undisturbed) if "eval" not in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["rows"] for line in steps] == [[8 * t, 8 * t + 8] for t in range(STEPS)]
    assert [line["tokens"] for line in steps] == [256 * (t + 1) for t in range(STEPS)]
    evaluated = [line["step"] for line in metrics(undisturbed) if "eval" in line]
    assert evaluated == [9, 18, 24]


def test_training_learns(undisturbed: Path) -> None:
    evaluations = [
        line["eval"]["held"]["CE loss"] for line in metrics(undisturbed) if "eval" in line
    ]
    assert evaluations[-1] < evaluations[0] < 6.3  # ln 512 = 6.24


def test_finished_run_says_so_and_does_nothing(undisturbed: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
    result = run(undisturbed.parent / "train.yaml")
    assert result.returncode == 0
    assert f"already finished at step {STEPS}" in result.stderr
    after = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
    assert {p for p in before if p.is_file() and before[p] != after[p]} == set()


def test_killed_run_resumes_bit_for_bit(
    undisturbed: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    step = random.Random().randint(7, STEPS - 2)
    config = write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")
    code, _ = run_until(f"step {step:>2}/", signal.SIGKILL, config)
    assert code == -signal.SIGKILL
    result = run(config)
    assert result.returncode == 0, result.stderr
    assert "resuming from" in result.stderr
    assert metrics(tmp_path / "run") == metrics(undisturbed)
    assert same_bits(final(tiny_mixture, tmp_path / "run"), final(tiny_mixture, undisturbed))


@pytest.mark.slow
def test_sigterm_saves_exits_with_requeue_code_and_resumes_bit_for_bit(
    undisturbed: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")
    code, stderr = run_until("step  8/", signal.SIGTERM, config)
    assert code == 75
    assert "stopped by SIGTERM at step" in stderr
    result = run(config)
    assert result.returncode == 0, result.stderr
    assert metrics(tmp_path / "run") == metrics(undisturbed)
    assert same_bits(final(tiny_mixture, tmp_path / "run"), final(tiny_mixture, undisturbed))


@pytest.mark.slow
def test_moved_from_one_rank_to_two_and_back_reads_the_same_rows(
    undisturbed: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")
    for ranks, microbatch, stop in ((1, 256, 5), (2, 32, 14), (1, 128, STEPS)):
        result = run(
            config,
            f"--train_module.rank_microbatch_size={microbatch}",
            f"--trainer.hard_stop={{value: {stop}, unit: steps}}",
            "--trainer.callbacks.lm_evaluator.eval_on_finish=false",
            ranks=ranks,
        )
        assert result.returncode == 0, result.stderr
    moved = [line for line in metrics(tmp_path / "run") if "eval" not in line]
    straight = [line for line in metrics(undisturbed) if "eval" not in line]
    floats = ("train/CE loss", "optim/total grad norm")
    assert without(moved, *floats) == without(straight, *floats)
    for name in floats:
        got = torch.tensor([line[name] for line in moved])
        want = torch.tensor([line[name] for line in straight])
        torch.testing.assert_close(got, want, rtol=2e-4, atol=0)


def train(lock: Path, save_folder: Path) -> None:
    build_trainer(lock, save_folder, world=group_world()).fit()


@pytest.mark.slow
def test_torchrun_forwards_sigterm_and_two_ranks_resume_bit_for_bit(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    run_ranks(train, 2, tiny_mixture, tmp_path / "straight")
    stopped = write_config(tmp_path / "stopped.yaml", tiny_mixture, tmp_path / "stopped")
    code, stderr = run_until("step 10/", signal.SIGTERM, stopped, ranks=2)
    assert code == 1  # torchrun's own
    assert stderr.count("stopped by SIGTERM at step") == 1
    result = run(stopped, ranks=2)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("resuming from") == 1
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "straight")
    assert same_bits(
        final(tiny_mixture, tmp_path / "stopped"), final(tiny_mixture, tmp_path / "straight")
    )
