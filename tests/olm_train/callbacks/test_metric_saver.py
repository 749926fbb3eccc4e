"""Files with the latest metrics: which ones, of which steps, under which names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import build_trainer, metrics

from olm_data.errors import UsageError

PREFIX = "--trainer.callbacks.metric_saver"


def run(mixture: Path, folder: Path, *options: str) -> dict[str, dict[str, object]]:
    """The files of a run of 4 steps, evaluated at its end."""
    given = [f"{PREFIX}.{option}" for option in options] or [f"{PREFIX}.enabled=true"]
    build_trainer(mixture, folder, "--trainer.hard_stop={value: 4, unit: steps}", *given).fit()
    names = sorted({*folder.glob("*.json")} - {folder / n for n in ("config.json",)})
    found = {path.name: json.loads(path.read_bytes()) for path in names}
    return {name: found[name] for name in found if "metrics" in found[name]}


def test_the_last_values_are_in_metrics_json_and_the_losses_are_as_without(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    files = run(tiny_mixture, tmp_path / "a")
    assert list(files) == ["metrics.json"]
    last = [line for line in metrics(tmp_path / "a") if "eval" not in line][-1]
    content = files["metrics.json"]
    assert content["step"] == 4
    captured = content["metrics"]
    assert isinstance(captured, dict)
    assert captured["train/CE loss"] == last["train/CE loss"]
    assert captured["optim/lr"] == last["optim/lr"]
    assert captured["eval/held/CE loss"] > 0
    assert run(tiny_mixture, tmp_path / "b", "enabled=false") == {}
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


def test_files_of_steps_come_at_an_interval_and_at_fixed_steps(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    files = run(
        tiny_mixture,
        tmp_path,
        "save_interval=2",
        "fixed_steps=[3]",
        "step_metrics_fname='at-{step}.json'",
        "final_metrics_fname=last.json",
        "metrics_to_capture=[train/*, optim/lr]",
    )
    assert sorted(files) == ["at-2.json", "at-3.json", "at-4.json", "last.json"]
    assert [files[f"at-{n}.json"]["step"] for n in (2, 3, 4)] == [2, 3, 4]
    captured = files["last.json"]["metrics"]
    assert isinstance(captured, dict)
    assert {name.partition("/")[0] for name in captured} == {"train", "optim"}
    assert [name for name in captured if name.startswith("optim")] == ["optim/lr"]


@pytest.mark.parametrize(
    "option", ["step_metrics_fname=same.json", "final_metrics_fname=../metrics.json"]
)
def test_a_name_that_would_leave_the_folder_or_be_written_over_is_refused(
    option: str, tiny_mixture: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"a \.json file|the name of a \.json file"):
        build_trainer(tiny_mixture, tmp_path, f"{PREFIX}.{option}")
