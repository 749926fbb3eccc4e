"""Row 53: SIGKILL at any operation of a save leaves a loadable checkpoint, the old or the new."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
from support.kill import killed_at_each_operation
from support.runs import build_trainer, stop

from olm_train.checkpoint.load import newest_checkpoint
from olm_train.checkpoint.manifest import partial_folders, remove_partial
from olm_train.distributed.world import World

OPTIONS = (
    "--data_loader.prefetch=0",
    "--trainer.callbacks.lm_evaluator.enabled=false",
    "--trainer.callbacks.checkpointer={save_interval: 9, ephemeral_save_interval: 1}",
)


def train_to(step: int, lock: Path, folder: Path) -> None:
    build_trainer(lock, folder, *OPTIONS, stop(step)).fit()


@pytest.fixture(scope="module")
def at_step_two(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped at step 2, its checkpoint ephemeral: the next save will remove it."""
    folder = tmp_path_factory.mktemp("two") / "run"
    train_to(2, tiny_mixture, folder)
    return folder


@pytest.mark.slow
def test_53_killed_at_every_operation_there_is_always_a_good_checkpoint(
    at_step_two: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    copies = killed_at_each_operation(at_step_two, tmp_path, partial(train_to, 3), tiny_mixture)
    found: list[int] = []
    left_partial = 0
    for folder in copies:
        left_partial += bool(partial_folders(folder))
        for _ in range(2):  # as the kill left it, and cleaned up
            checkpoint = newest_checkpoint(folder, World(), pytest.fail)
            assert checkpoint is not None
            remove_partial(folder)
            assert not partial_folders(folder)
        found.append(checkpoint.step)
    assert found == sorted(found)  # the old one up to some operation, the new one from there on
    assert set(found) == {2, 3}
    assert left_partial > 5


def test_53_a_run_killed_while_saving_goes_on_and_cleans_up(
    at_step_two: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(at_step_two, folder)
    shutil.copytree(folder / "step00000002", folder / "step00000003.tmp")
    (folder / "step00000003.tmp" / "manifest.json").unlink()
    train_to(3, tiny_mixture, folder)
    assert not partial_folders(folder)
    assert newest_checkpoint(folder, World(), pytest.fail).step == 3  # type: ignore[union-attr]
