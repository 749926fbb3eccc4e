"""Checkpoints appear at their intervals and stay as long as the rule says."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import build_trainer

from olm_data.errors import UsageError
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.place import candidates
from olm_train.checkpoint.policy import CheckpointerConfig
from olm_train.distributed.world import World


def train(lock: Path, folder: Path, stop: int, options: str) -> list[int]:
    build_trainer(
        lock,
        folder,
        f"--trainer.callbacks.checkpointer={options}",
        f"--trainer.hard_stop={{value: {stop}, unit: steps}}",
        "--trainer.callbacks.lm_evaluator.enabled=false",
    ).fit()
    found = [open_checkpoint(folder / name, World()).step for name in candidates(folder)]
    assert (folder / "latest").read_text().strip() == f"step{found[0]:08d}"
    return found[::-1]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ("{save_interval: 3}", [3, 6, 7]),
        ("{save_interval: 7}", [7]),
        ("{save_interval: 5, ephemeral_save_interval: 1}", [5, 7]),
        ("{save_interval: 5, ephemeral_save_interval: 2, remove: never}", [2, 4, 5, 6, 7]),
    ],
)
def test_what_is_left_after_seven_steps(
    tiny_mixture: Path, tmp_path: Path, options: str, left: list[int]
) -> None:
    assert train(tiny_mixture, tmp_path, 7, options) == left


def test_ephemeral_ones_of_an_earlier_run_go_with_the_next_save(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    keep = "{save_interval: 5, ephemeral_save_interval: 1, remove: never}"
    assert train(tiny_mixture, tmp_path, 4, keep) == [1, 2, 3, 4]
    rule = "{save_interval: 5, remove: ephemeral_only}"
    assert train(tiny_mixture, tmp_path, 6, rule) == [4, 5, 6]  # 4 ended a run
    rule = "{save_interval: 5, remove: all_non_permanent}"
    assert train(tiny_mixture, tmp_path, 8, rule) == [5, 8]


@pytest.mark.parametrize(
    "options",
    [
        {"save_interval": 0},
        {"save_interval": 5, "ephemeral_save_interval": 5},
        {"ephemeral_save_interval": 0},
    ],
)
def test_intervals_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        CheckpointerConfig(**options)  # type: ignore[arg-type]
