"""Row 55: a disk that fills up while a checkpoint is saved costs a warning, not the run."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import build_trainer, metrics, same_bits, tensors

from olm_data.errors import ResourceError
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.load import newest_checkpoint, open_checkpoint
from olm_train.checkpoint.manifest import candidates, partial_folders
from olm_train.distributed.world import World
from olm_train.trainer import Trainer


class Disk(Callback):
    """Lets the kernel refuse every write beyond `size` bytes of a file during some steps."""

    def __init__(self, first: int, last: int, size: Callable[[Trainer], int]) -> None:
        self.first, self.last, self.size = first, last, size
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def pre_step(self, batches: object) -> None:
        if self.trainer.step + 1 == self.first:
            self.trainer.finish_save()  # the save of step 2 is complete
            limit = self.size(self.trainer)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, self.before[1]))
        elif self.trainer.step == self.last:
            self.close()

    def close(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def below_the_tensors(trainer: Trainer) -> int:
    return 20_000  # metrics.jsonl fits, a rank's tensors do not


def below_the_metrics(trainer: Trainer) -> int:
    return (trainer.work_dir / "metrics.jsonl").stat().st_size + 10  # within the next line


def train(lock: Path, folder: Path, stop: int, *callbacks: Callback, background: bool) -> Trainer:
    trainer = build_trainer(
        lock,
        folder,
        "--trainer.callbacks.lm_evaluator.enabled=false",
        "--trainer.metrics_collect_interval=1",
        "--trainer.callbacks.checkpointer={save_interval: 8, ephemeral_save_interval: 2, "
        f"save_async: {str(background).lower()}}}",
        f"--trainer.hard_stop={{value: {stop}, unit: steps}}",
        callbacks={f"disk {n}": callback for n, callback in enumerate(callbacks)},
    )
    trainer.fit()
    return trainer


@pytest.fixture(scope="module")
def undisturbed(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(tiny_mixture, folder, 7, background=False)
    return folder


@pytest.mark.parametrize("size", [below_the_tensors, below_the_metrics])
@pytest.mark.parametrize("background", [False, True])
def test_55_training_goes_on_warns_and_saves_again_and_the_last_good_one_stays(
    tiny_mixture: Path,
    tmp_path: Path,
    undisturbed: Path,
    capsys: pytest.CaptureFixture[str],
    background: bool,
    size: Callable[[Trainer], int],
) -> None:
    there: list[list[str]] = []

    class Look(Callback):
        def post_step(self) -> None:
            if self.trainer.step == 5:  # the save of step 4 has failed
                self.trainer.finish_save()
                there.append(candidates(tmp_path) + partial_folders(tmp_path))

    trainer = train(tiny_mixture, tmp_path, 7, Disk(3, 5, size), Look(), background=background)
    said = capsys.readouterr().err
    assert said.count("training goes on; the next save is the next try") == 1
    assert said.count("metrics.jsonl could not be written") == (size is below_the_metrics)
    assert there == [["step00000002"]]  # the last good one, and nothing half-written
    assert trainer.checkpoints.saved.keys() == {7}  # 2 went after 6, 6 after 7
    assert metrics(tmp_path) == metrics(undisturbed)
    one, other = (
        tensors(lambda: build_trainer(tiny_mixture, tmp_path / "none"), folder / "step00000007")
        for folder in (tmp_path, undisturbed)
    )
    assert same_bits(one, other)


def test_55_a_last_save_that_fails_is_exit_5_and_the_one_before_stays(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    with pytest.raises(ResourceError, match="step 3 could not be written") as caught:
        train(tiny_mixture, tmp_path, 3, Disk(3, 9, below_the_tensors), background=True)
    assert caught.value.exit_code == 5
    newest = newest_checkpoint(tmp_path, World(), pytest.fail)
    assert newest is not None
    assert newest.step == 2
    train(tiny_mixture, tmp_path, 3, background=False)
    assert open_checkpoint(tmp_path / "step00000003", World()).step == 3
