"""FAULTS rows 48, 53 to 56: kills, damage, full disks and other versions while saving and after."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.kill import killed_at_each_operation
from support.runs import STEPS, build_trainer, metrics, same_bits, stop, tensors
from support.seal import seal

from olm_data.errors import ResourceError, ValidationError
from olm_train.callbacks.base import Callback
from olm_train.checkpoint import manager
from olm_train.checkpoint.load import newest_checkpoint, open_checkpoint
from olm_train.checkpoint.manifest import VERSION, candidates, partial_folders, remove_partial
from olm_train.checkpoint.portable import model_config
from olm_train.distributed.world import World
from olm_train.trainer import Trainer


class Killed(BaseException):
    """Stands for the end of the process: nothing in the trainer expects it."""


class KillAt(Callback):
    """Ends the run after a step, before anything else happens for it."""

    priority = 100

    def __init__(self, step: int) -> None:
        self.step = step

    def post_step(self) -> None:
        if self.trainer.step == self.step:
            raise Killed


@pytest.mark.slow
def test_48_killed_at_every_step_in_turn_each_step_is_made_of_its_rows_once(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    """Run k is killed in step k, so it repeats step k - 1, which was not saved, and saves it."""
    saving = "--trainer.callbacks.checkpointer={save_interval: 6, ephemeral_save_interval: 1}"
    for step in range(1, STEPS + 1):
        trainer = build_trainer(
            tiny_mixture,
            tmp_path / "run",
            saving,
            f"--data_loader.prefetch={step % 4}",
            callbacks={"kill": KillAt(step)},
        )
        with pytest.raises(Killed):
            trainer.fit()
        assert trainer.resumed == (step > 2)
    build_trainer(tiny_mixture, tmp_path / "run", saving).fit()
    build_trainer(tiny_mixture, tmp_path / "straight", saving).fit()
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")


SAVING = (
    "--data_loader.prefetch=0",
    "--trainer.callbacks.lm_evaluator.enabled=false",
    "--trainer.callbacks.checkpointer={save_interval: 9, ephemeral_save_interval: 1}",
)


def train_to(step: int, lock: Path, folder: Path) -> None:
    build_trainer(lock, folder, *SAVING, stop(step)).fit()


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


FILES = (
    "model_and_optim/index.json",
    "model_and_optim/rank00000.safetensors",
    "train.json",
    "config.json",
    "mixture.lock.json",
    "manifest.json",
)


@pytest.fixture(scope="module")
def saved(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped at step 4, with permanent checkpoints at 2 and 4."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    build_trainer(tiny_mixture, folder, *options(4)).fit()
    return folder


def options(stop: int) -> tuple[str, ...]:
    return (
        "--trainer.callbacks.lm_evaluator.enabled=false",
        "--trainer.callbacks.checkpointer.save_interval=2",
        f"--trainer.hard_stop={{value: {stop}, unit: steps}}",
    )


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def add_beside(path: Path) -> None:
    (path.parent / "rank00009.safetensors").write_bytes(b"stray")


DAMAGE = [(name, how) for name in FILES for how in (flip, truncate, extend, Path.unlink)] + [
    ("model_and_optim/index.json", add_beside)
]


@pytest.mark.parametrize(
    ("name", "damage"), DAMAGE, ids=[f"{how.__name__}-{name}" for name, how in DAMAGE]
)
def test_54_every_damage_to_every_file_is_found(
    saved: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    folder = shutil.copytree(saved / "step00000004", tmp_path / "step00000004")
    open_checkpoint(folder, World())
    damage(folder / name)
    with pytest.raises(ValidationError, match="manifest|rank00009|" + name.split("/")[-1]):
        open_checkpoint(folder, World())


def test_54_run_falls_back_says_so_and_saves_over_the_damaged_one(
    saved: Path, tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    flip(folder / "step00000004" / "model_and_optim" / "rank00000.safetensors")
    build_trainer(tiny_mixture, folder, *options(6)).fit()
    said = capsys.readouterr().err
    assert "warning: checkpoint step00000004 is damaged" in said
    assert "falling back to the checkpoint of step 2" in said
    assert "resuming from" in said
    for step in (2, 4, 6):
        assert open_checkpoint(folder / f"step{step:08d}", World()).step == step


def files(folder: Path) -> list[Path]:
    """All that is there but the lease, which each start takes and gives back."""
    return sorted(path for path in folder.rglob("*") if not path.name.startswith("lease-"))


def test_54_strict_refuses_to_fall_back(saved: Path, tiny_mixture: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    truncate(folder / "step00000004" / "train.json")
    before = files(folder)
    with pytest.raises(ValidationError, match="the newest checkpoint does not verify") as refused:
        build_trainer(tiny_mixture, folder, *options(6), "--trainer.load_strict=true").fit()
    assert "step00000004 is damaged: train.json" in str(refused.value.why)
    assert "step 2 without --strict" in str(refused.value.fix)
    assert files(folder) == before
    shutil.rmtree(folder / "step00000004")
    build_trainer(tiny_mixture, folder, *options(6), "--trainer.load_strict=true").fit()


def test_54_all_damaged_is_an_error_and_nothing_is_started_or_removed(
    saved: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    for step in (2, 4):
        truncate(folder / f"step{step:08d}" / "train.json")
    before = files(folder)
    with pytest.raises(ValidationError, match="no usable checkpoint"):
        build_trainer(tiny_mixture, folder, *options(6)).fit()
    assert files(folder) == before


def test_54_nothing_older_is_removed_while_the_newest_does_not_verify(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Damage(Callback):
        """Flips a bit of the checkpoint of step 4 between its last write and its check."""

        def post_step(self) -> None:
            if self.trainer.step == 3:
                real = manager.save_checkpoint

                def damaged(*arguments: Any, **options: Any) -> str:
                    folder = real(*arguments, **options)
                    flip(Path(folder) / "model_and_optim" / "rank00000.safetensors")
                    monkeypatch.undo()
                    return folder

                monkeypatch.setattr(manager, "save_checkpoint", damaged)

    monkeypatch = pytest.MonkeyPatch()
    one = "--trainer.callbacks.checkpointer.max_checkpoints=1"
    build_trainer(tiny_mixture, tmp_path, *options(5), one, callbacks={"damage": Damage()}).fit()
    said = capsys.readouterr().err
    assert "checkpoint of step 4 was written but does not verify" in said
    assert "no older checkpoint is removed" in said
    assert open_checkpoint(tmp_path / "step00000002", World()).step == 2
    assert candidates(tmp_path) == ["step00000005", "step00000004", "step00000002"]


def unreadable_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def unreadable_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_out(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere.json")
    path.symlink_to(path.parents[2] / "elsewhere.json")


def brackets(path: Path) -> None:
    path.write_bytes(b"[" * 100_000)


@pytest.mark.parametrize("damage", [unreadable_folder, unreadable_pipe, link_out, brackets])
@pytest.mark.parametrize("name", ["manifest.json", "train.json"])
def test_54_t11_what_cannot_be_read_at_all_falls_back_with_the_name_of_the_checkpoint(
    name: str,
    damage: Callable[[Path], None],
    saved: Path,
    tiny_mixture: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    damage(folder / "step00000004" / name)
    with pytest.raises(ValidationError, match="the newest checkpoint does not verify"):
        build_trainer(tiny_mixture, folder, *options(6), "--trainer.load_strict=true").restore()
    capsys.readouterr()
    trainer = build_trainer(tiny_mixture, folder, *options(6))
    trainer.restore()
    said = capsys.readouterr().err
    assert trainer.step == 2
    assert "warning: checkpoint step00000004 is damaged" in said
    assert "falling back to the checkpoint of step 2" in said


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


def test_56_what_a_later_program_knows_of_a_model_has_its_default_where_an_old_config_lacks_it(
    at_step_two: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(at_step_two / "step00000002", tmp_path / "step00000002")
    config = json.loads((folder / "config.json").read_bytes())
    del config["model"]["norm"]["eps"]
    (folder / "config.json").write_text(json.dumps(config))
    seal(folder)
    assert model_config(open_checkpoint(folder, World())).norm.eps == 1e-6


@pytest.mark.parametrize("version", [1, 2, VERSION + 7])
def test_56_another_version_is_refused_with_the_numbers_and_left_alone(
    version: int, at_step_two: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(at_step_two, tmp_path / "run")
    seal(folder / "step00000002", version=version)
    before = {path: path.read_bytes() for path in (folder / "step00000002").rglob("*.*")}
    with pytest.raises(ValidationError) as caught:
        train_to(4, tiny_mixture, folder)
    assert f"version {version}; this program reads" in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before
