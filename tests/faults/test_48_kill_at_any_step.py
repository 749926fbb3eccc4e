"""Row 48, the trainer: killed in any step, each step of the run is made of its rows, once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import STEPS, build_trainer, metrics

from olm_train.callbacks.base import Callback


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
