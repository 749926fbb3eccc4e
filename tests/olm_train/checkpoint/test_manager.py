"""A save beside the training: what it holds, one at a time, in bounded time, and never alone."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.polling import wait_until
from support.runs import SIX_STEPS, build_trainer, metrics, same_bits, tensors

import olm_train.checkpoint.manager
from olm_data.errors import ResourceError, ValidationError
from olm_train.callbacks.base import Callback

SAVE = "{save_interval: 3, fixed_steps: [4], pre_train_checkpoint: true, save_async: %s}"


class At(Callback):
    """Does something after a step."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step, self.action = step, action

    def post_step(self) -> None:
        if self.trainer.step == self.step:
            self.action()


def train(lock: Path, folder: Path, background: str, *callbacks: Callback, more: str = "") -> Any:
    trainer = build_trainer(
        lock,
        folder,
        f"--trainer.callbacks.checkpointer={SAVE % background}",
        *filter(None, [more]),
        quiet=True,
        stop=6,
        callbacks={f"at {n}": callback for n, callback in enumerate(callbacks)},
    )
    trainer.fit()
    return trainer


class Gate:
    """Stands before every save but that of step 0; keeps a diary."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.diary = threading.Event(), list[str]()
        real = olm_train.checkpoint.manager.save_checkpoint

        def gated(folder: Any, contents: Any, *arguments: Any, **options: Any) -> str:
            self.diary.append(f"begin {contents.step}")
            if contents.step:
                assert self.open.wait(600)
            done = real(folder, contents, *arguments, **options)
            self.diary.append(f"end {contents.step}")
            return done

        monkeypatch.setattr(olm_train.checkpoint.manager, "save_checkpoint", gated)


def test_later_steps_change_nothing_in_what_is_saved_and_saves_do_not_overlap(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(tiny_mixture, tmp_path / "plain", "false")
    gate = Gate(monkeypatch)

    def seen() -> None:
        # Step 3 is not written yet and its weights have changed since; only now it may go on.
        wait_until(lambda: gate.diary[-1] == "begin 3", "the save of step 3")
        assert not (tmp_path / "run" / "step00000003").exists()
        gate.open.set()

    fixed = "--trainer.callbacks.checkpointer.fixed_steps=[5]"
    beside = train(tiny_mixture, tmp_path / "run", "true", At(4, seen), more=fixed)
    assert gate.diary == [f"{what} {step}" for step in (0, 3, 5, 6) for what in ("begin", "end")]
    assert plain.checkpoints.saved.keys() == {0, 3, 4, 6}
    assert beside.checkpoints.saved.keys() == {0, 3, 5, 6}
    for step in ("step00000000", "step00000003", "step00000006"):
        one, other = (
            tensors(lambda: build_trainer(tiny_mixture, tmp_path / "none"), tmp_path / run / step)
            for run in ("plain", "run")
        )
        assert same_bits(one, other)
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "run")


def test_a_save_that_takes_too_long_ends_the_run(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    timeout = "--trainer.callbacks.checkpointer.save_timeout=0.5"
    # Only step 3 stands at the gate: the save before it may take as long as the disk does.
    free = At(2, lambda: wait_until(lambda: "end 0" in gate.diary, "the save of step 0"))
    with pytest.raises(ResourceError, match=r"step 3 is not written after 0\.5 seconds"):
        train(tiny_mixture, tmp_path, "true", free, more=timeout)
    gate.open.set()


def test_an_error_of_the_run_waits_for_the_save(tiny_mixture: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        train(tiny_mixture, tmp_path, "true", At(5, fail))
    assert (tmp_path / "latest").read_text() == "step00000004\n"
    assert (tmp_path / "step00000004" / "manifest.json").exists()


def test_a_run_whose_newest_checkpoint_is_gone_says_so_and_never_begins_anew(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_trainer(tiny_mixture, tmp_path, *SIX_STEPS).fit()
    log = (tmp_path / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "step00000006")
    gone = "the checkpoint step00000006 that `latest` names is gone"
    trainer = build_trainer(tiny_mixture, tmp_path, *SIX_STEPS)
    trainer.restore()
    assert trainer.step == 4
    assert f"warning: {gone}" in capsys.readouterr().err
    for folder in tmp_path.glob("step*"):
        shutil.rmtree(folder)
    with pytest.raises(ValidationError, match=f"(?s)no usable checkpoint.*{gone}"):
        build_trainer(tiny_mixture, tmp_path, *SIX_STEPS).fit()
    assert (tmp_path / "metrics.jsonl").read_bytes() == log
    (tmp_path / "latest").unlink()
    trainer = build_trainer(tiny_mixture, tmp_path, *SIX_STEPS)
    trainer.restore()
    assert trainer.step == 0
