"""Row 54: a damaged checkpoint is never loaded; the run falls back to the last one and says so."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs import build_trainer

from olm_data.errors import ValidationError
from olm_train.callbacks.base import Callback
from olm_train.checkpoint import saver
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.place import candidates
from olm_train.world import World

FILES = (
    "model_and_optim/.metadata",
    "model_and_optim/__0_0.distcp",
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
    (path.parent / "__9_0.distcp").write_bytes(b"stray")


DAMAGE = [(name, how) for name in FILES for how in (flip, truncate, extend, Path.unlink)] + [
    ("model_and_optim/.metadata", add_beside)
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
    with pytest.raises(ValidationError, match="manifest|__9_0|" + name.split("/")[-1]):
        open_checkpoint(folder, World())


def test_54_run_falls_back_says_so_and_saves_over_the_damaged_one(
    saved: Path, tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    flip(folder / "step00000004" / "model_and_optim" / "__0_0.distcp")
    build_trainer(tiny_mixture, folder, *options(6)).fit()
    said = capsys.readouterr().err
    assert "warning: checkpoint step00000004 is damaged" in said
    assert "falling back to the checkpoint of step 2" in said
    assert "resuming from" in said
    for step in (2, 4, 6):
        assert open_checkpoint(folder / f"step{step:08d}", World()).step == step


def test_54_strict_refuses_to_fall_back(saved: Path, tiny_mixture: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    truncate(folder / "step00000004" / "train.json")
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValidationError, match="the newest checkpoint does not verify") as refused:
        build_trainer(tiny_mixture, folder, *options(6), "--trainer.load_strict=true").fit()
    assert "step00000004 is damaged: train.json" in str(refused.value.why)
    assert "step 2 without --strict" in str(refused.value.fix)
    assert sorted(folder.rglob("*")) == before
    shutil.rmtree(folder / "step00000004")
    build_trainer(tiny_mixture, folder, *options(6), "--trainer.load_strict=true").fit()


def test_54_all_damaged_is_an_error_and_nothing_is_started_or_removed(
    saved: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    for step in (2, 4):
        truncate(folder / f"step{step:08d}" / "train.json")
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValidationError, match="no usable checkpoint"):
        build_trainer(tiny_mixture, folder, *options(6)).fit()
    assert sorted(folder.rglob("*")) == before


def test_54_a_foreign_pickle_is_never_unpickled(
    saved: Path, tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, canary = shutil.copytree(saved, tmp_path / "run"), tmp_path / "canary"

    class Payload:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return Path.touch, (canary,)

    for name in (".metadata", "__0_0.distcp"):
        (folder / "step00000004" / "model_and_optim" / name).write_bytes(pickle.dumps(Payload()))
    build_trainer(tiny_mixture, folder, *options(6)).fit()
    assert "falling back" in capsys.readouterr().err
    assert not canary.exists()


def test_54_nothing_older_is_removed_while_the_newest_does_not_verify(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Damage(Callback):
        """Flips a bit of the checkpoint of step 4 between its last write and its check."""

        def post_step(self) -> None:
            if self.trainer.step == 3:
                real = saver.save_checkpoint

                def damaged(*arguments: Any, **options: Any) -> str:
                    folder = real(*arguments, **options)
                    flip(Path(folder) / "model_and_optim" / "__0_0.distcp")
                    monkeypatch.undo()
                    return folder

                monkeypatch.setattr(saver, "save_checkpoint", damaged)

    monkeypatch = pytest.MonkeyPatch()
    one = "--trainer.callbacks.checkpointer.max_checkpoints=1"
    build_trainer(tiny_mixture, tmp_path, *options(5), one, callbacks={"damage": Damage()}).fit()
    said = capsys.readouterr().err
    assert "checkpoint of step 4 was written but does not verify" in said
    assert "no older checkpoint is removed" in said
    assert open_checkpoint(tmp_path / "step00000002", World()).step == 2
    assert candidates(tmp_path) == ["step00000005", "step00000004", "step00000002"]
