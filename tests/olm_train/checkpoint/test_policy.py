"""Checkpoints appear at their intervals and stay as long as the rule says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs import build_trainer

from olm_data.errors import UsageError
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import Kind, candidates
from olm_train.checkpoint.policy import CheckpointerConfig, Removal, removable
from olm_train.distributed.world import World


def train(lock: Path, folder: Path, stop: int, options: str) -> list[int]:
    build_trainer(
        lock, folder, f"--trainer.callbacks.checkpointer={options}", stop=stop, quiet=True
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
        # a list of steps stands in place of the interval
        ("{save_steps: [2, 5]}", [2, 5, 7]),
        ("{save_steps: [2, 4, 5], max_checkpoints: 2}", [4, 5, 7]),
        ("{save_steps: [2, 4], fixed_steps: [3], remove: all_non_permanent}", [2, 3, 4, 7]),
        ("{save_steps: [2], save_interval: 5}", [2, 5, 7]),
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
        *({"save_steps": steps} for steps in ([4, 2], [2, 2], [0])),
    ],
)
def test_steps_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CheckpointerConfig(**options)


def test_after_a_step_of_the_list_ephemeral_checkpoints_cool_down() -> None:
    rule = CheckpointerConfig(save_steps=[4], ephemeral_save_interval=1, ephemeral_cooldown=2)
    kinds = [rule.kind_at(step, 9) for step in range(3, 9)]
    often = Kind.ephemeral
    assert kinds == [often, Kind.permanent, None, None, often, often]
    assert rule.interval is None


known = st.dictionaries(st.integers(0, 99), st.sampled_from(Kind), min_size=1)


@given(known, st.sampled_from(Removal), st.data())
def test_the_newest_good_one_newer_ones_and_permanent_ones_stay(
    kinds: dict[int, Kind], rule: Removal, data: st.DataObject
) -> None:
    newest = data.draw(st.sampled_from(sorted(kinds)))
    gone = removable(kinds, newest, rule)
    assert gone == sorted(set(gone))
    for step in gone:
        assert step < newest
        assert kinds[step] is not Kind.permanent


def test_each_rule_removes_what_it_says() -> None:
    kinds = {1: Kind.permanent, 2: Kind.ephemeral, 3: Kind.final, 4: Kind.ephemeral}
    assert removable(kinds, 4, Removal.ephemeral_only) == [2]
    assert removable(kinds, 4, Removal.all_non_permanent) == [2, 3]
    assert removable(kinds, 4, Removal.never) == []


def test_an_ephemeral_checkpoint_waits_after_one_that_stays() -> None:
    def steps(**options: int | None) -> list[int]:
        config = CheckpointerConfig(
            save_interval=10,
            ephemeral_save_interval=2,
            fixed_steps=[5],
            **options,  # type: ignore[arg-type]
        )
        return [n for n in range(1, 20) if config.kind_at(n, 100) is Kind.ephemeral]

    assert steps() == [2, 4, 6, 8, 12, 14, 16, 18]
    assert steps(ephemeral_cooldown=1) == [2, 4, 8, 12, 14, 16, 18]
    assert steps(ephemeral_cooldown=3) == [2, 4, 14, 16, 18]
    with pytest.raises(UsageError, match="no effect without ephemeral_save_interval"):
        CheckpointerConfig(ephemeral_cooldown=3)


def test_so_many_of_the_newest_permanent_ones_stay(tiny_mixture: Path, tmp_path: Path) -> None:
    build_trainer(
        tiny_mixture,
        tmp_path,
        "--trainer.callbacks.checkpointer={save_interval: 2, max_checkpoints: 2, fixed_steps: [3]}",
        stop=8,
        quiet=True,
    ).fit()
    assert candidates(tmp_path) == ["step00000008", "step00000006", "step00000003"]
    with pytest.raises(UsageError, match="no effect with remove: never"):
        CheckpointerConfig(max_checkpoints=2, remove=Removal.never)
