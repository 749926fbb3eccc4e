"""Row 54: a damaged checkpoint is never loaded; the run falls back to the last one and says so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs import build_trainer

from olm_data.errors import ValidationError
from olm_train.callbacks.base import Callback
from olm_train.checkpoint import manager
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import candidates
from olm_train.distributed.world import World

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
