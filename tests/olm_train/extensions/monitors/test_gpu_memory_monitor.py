from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.runs import build_trainer, metrics, one_step_trainer

from olm_data.run_log.metric_names import GPU_ACTIVE_GIB, GPU_RESERVED_GIB
from olm_train.extensions.monitors.gpu_memory_monitor import GPUMemoryMonitorCallback

ON = "--trainer.callbacks.gpu_memory_monitor.enabled=true"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_that_there_is_nothing_to_look_at(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_step_trainer(tiny_mixture, tmp_path, ON).fit()
    assert "gpu_memory_monitor has nothing to look at: there is no GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_peaks_of_each_step_are_logged(tiny_mixture: Path, tmp_path: Path) -> None:
    build_trainer(tiny_mixture, tmp_path, ON).fit()
    lines = [line for line in metrics(tmp_path) if "eval" not in line]
    assert all(0 < line[GPU_ACTIVE_GIB] <= line[GPU_RESERVED_GIB] for line in lines)


@pytest.mark.parametrize(("device_id", "looked_at"), [(None, "cuda:5"), (1, "cuda:1")])
def test_it_looks_at_the_gpu_that_is_named_else_at_that_of_the_rank(
    device_id: int | None, looked_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda d: seen.append(str(d)))
    callback = GPUMemoryMonitorCallback(device_id=device_id)
    world = SimpleNamespace(device=torch.device("cuda", 5))
    callback.trainer = SimpleNamespace(world=world)  # type: ignore[assignment]
    callback.pre_train()
    assert seen == [looked_at]
