from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs import build_trainer, metrics

from olm_data.run_log.metric_names import CE_LOSS, GRAD_NORM, SPIKE_SCORE, SPIKE_SCORE_TOTAL
from olm_train.callbacks.base import Callback
from olm_train.extensions.monitors.stability_monitor import FEWEST, StabilityMonitorCallback


class Quiet(StabilityMonitorCallback):
    """One that no trainer holds: it keeps what it would tell."""

    def _tell(self, step: int, found: Any, watched: Any) -> None:
        self.told = [*getattr(self, "told", []), (step, found)]


def scores(monitor: StabilityMonitorCallback, losses: list[float], first: int = 1) -> list[Any]:
    lines = []
    for step, loss in enumerate(losses, first):
        line = {CE_LOSS: loss, GRAD_NORM: 1.0}
        monitor.pre_log_metrics(step, line)
        lines.append(line)
    return lines


@given(
    st.lists(st.floats(0.5, 4.0) | st.floats(50, 60) | st.just(math.nan), min_size=1, max_size=60),
    st.integers(FEWEST, 12),
    st.integers(1, 20),
)
def test_spikes_are_those_of_the_definition_in_any_cut_of_the_run(
    losses: list[float], window: int, rolling: int
) -> None:
    calm: list[float] = []
    spikes: list[int] = []
    for step, loss in enumerate(losses, 1):
        last = calm[-window:]
        limit = math.inf
        if len(last) >= FEWEST:
            limit = statistics.fmean(last) + 6 * statistics.pstdev(last, statistics.fmean(last))
        if math.isnan(loss) or loss > limit:
            spikes.append(step)
        else:
            calm.append(loss)
    monitor = Quiet(window_size=window, rolling_window=rolling)
    half = len(losses) // 2
    lines = scores(monitor, losses[:half])
    resumed = Quiet(window_size=window, rolling_window=rolling)
    resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    lines += scores(resumed, losses[half:], half + 1)
    for step, line in enumerate(lines, 1):
        assert line[SPIKE_SCORE_TOTAL] == len([s for s in spikes if s <= step]) / step
        recent = [s for s in spikes if step - rolling < s <= step]
        assert line.get(SPIKE_SCORE) == (len(recent) / rolling if step >= rolling else None)


def test_a_spike_hides_none_of_those_that_follow() -> None:
    monitor = Quiet(window_size=16)
    calm = [1.0, 1.1] * 10
    scores(monitor, [*calm, 9.0, 9.0, 9.0, 1.0])
    assert [step for step, _ in monitor.told] == [21, 22, 23]


@pytest.mark.parametrize(
    ("option", "steps"),
    [
        ({}, [21]),
        ({"threshold_std": 1000.0}, []),
        ({"loss_metric_name": "another"}, []),
        ({"grad_norm_metric_name": CE_LOSS, "loss_metric_name": "another"}, [21]),
        ({"window_size": 8, "threshold_std": 100.0}, []),
    ],
)
def test_each_option_has_its_effect(option: dict[str, Any], steps: list[int]) -> None:
    monitor = Quiet(**option)
    scores(monitor, [*[1.0, 1.1] * 10, 5.0])
    assert [step for step, _ in getattr(monitor, "told", [])] == steps


def test_each_spike_names_its_documents(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Raise(Callback):
        priority = 9

        def pre_log_metrics(self, step: int, metrics: dict[str, float]) -> None:
            metrics["watched"] = 100.0 if step in (12, 13) else 1.0 + step % 2 / 10

    (tmp_path / "with/spike-step00000012.json").mkdir(parents=True)  # it cannot be a file then
    monitor = StabilityMonitorCallback(window_size=10, loss_metric_name="watched")
    callbacks = {"raise": Raise(), "stability_monitor": monitor}
    stop = "--trainer.hard_stop={value: 15, unit: steps}"
    build_trainer(tiny_mixture, tmp_path / "with", stop, callbacks=callbacks).fit()
    said = capsys.readouterr().err
    assert "warning: spike at step 13: watched 100; documents: " in said
    assert "warning: spike at step 12: watched 100; its documents could not be written: " in said
    report = json.loads((tmp_path / "with/spike-step00000013.json").read_text())
    assert report["step"] == 13
    assert all(piece["input"] for row in report["rows"] for piece in row["documents"])
    line = next(each for each in metrics(tmp_path / "with") if each["step"] == 13)
    rows = [row["row"] for row in report["rows"]]
    assert (rows[0], rows[-1] + 1) == tuple(line["rows"])
