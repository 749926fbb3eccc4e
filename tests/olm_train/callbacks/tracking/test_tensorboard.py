"""Event files of a run: what a reader of the folder shows is the log, whatever happened."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.runs import STEPS, build_trainer, metrics
from support.tracked import logged, of_tensorboard, same

from olm_data.errors import UsageError
from olm_train.callbacks.tracking.tensorboard import TensorBoardCallback

ON = "--trainer.callbacks.tensorboard={}"


def test_a_run_with_it_trains_the_same_bits_and_a_resumed_one_has_each_step_once(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    build_trainer(tiny_mixture, tmp_path / "without").fit()
    folder = tmp_path / "with"
    trainer = build_trainer(
        tiny_mixture, folder, ON, "--trainer.hard_stop={value: 14, unit: steps}"
    )
    trainer.fit()
    for step in (13, 14):  # as if killed after step 12 was saved
        assert any(line["step"] == step for line in metrics(folder))
    shutil.rmtree(folder / "step00000014")
    build_trainer(tiny_mixture, folder, ON).fit()
    assert metrics(folder) == metrics(tmp_path / "without")
    assert len(of_tensorboard(folder)) == STEPS
    same(of_tensorboard(folder), logged(folder), digits=5)


def test_name_project_and_configuration_are_shown(tiny_mixture: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = TensorBoardCallback(name="first try", project="lab")
    stop = "--trainer.hard_stop={value: 1, unit: steps}"
    trainer = build_trainer(tiny_mixture, tmp_path, stop)
    trainer.callbacks.add("tensorboard", callback)
    trainer.fit()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (shown,) = events.Tensors("config/text_summary")
    text = shown.tensor_proto.string_val[0].decode()
    assert text.startswith("# lab: first try")
    assert '"global_batch_size": 256' in text


def test_it_is_off_when_told_so(tiny_mixture: Path, tmp_path: Path) -> None:
    stop = "--trainer.hard_stop={value: 1, unit: steps}"
    build_trainer(
        tiny_mixture, tmp_path, stop, "--trainer.callbacks.tensorboard={enabled: false}"
    ).fit()
    assert not (tmp_path / "tensorboard").exists()


def test_without_the_log_it_has_nothing_to_show(tiny_mixture: Path, tmp_path: Path) -> None:
    off = "--trainer.callbacks.metrics_logger.enabled=false"
    with pytest.raises(UsageError, match="metrics_logger is off"):
        build_trainer(tiny_mixture, tmp_path, ON, off).fit()
