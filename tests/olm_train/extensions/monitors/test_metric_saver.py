"""Files with the latest metrics: which ones, of which steps, under which names."""

from __future__ import annotations

import json
import shutil
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


def test_the_last_values_are_in_metrics_json(tiny_mixture: Path, tmp_path: Path) -> None:
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


def untimed(files: dict[str, dict[str, object]]) -> dict[str, object]:
    return {
        name: {key: v for key, v in found.items() if not key.startswith("throughput/")}
        for name, content in files.items()
        if isinstance(found := content["metrics"], dict)
    }


def test_a_run_that_was_killed_has_the_files_of_one_that_was_not(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("save_interval=4", "step_metrics_fname='at-{step}.json'")
    every = "--trainer.callbacks.lm_evaluator={datasets: {held: "
    every += f"{tiny_mixture.parent / 'held'}}}, eval_interval: 1000, fixed_steps: [1]}}"
    saved = "--trainer.callbacks.checkpointer={save_interval: 2}"

    def files(folder: Path) -> dict[str, object]:
        given = [f"{PREFIX}.{option}" for option in more]
        stop = "--trainer.hard_stop={value: 4, unit: steps}"
        build_trainer(tiny_mixture, folder, stop, every, saved, *given).fit()
        found = {path.name: json.loads(path.read_bytes()) for path in folder.glob("*.json")}
        return untimed({name: each for name, each in found.items() if "metrics" in each})

    plain = files(tmp_path / "plain")
    assert "eval/held/PPL" in plain["at-4.json"]  # type: ignore[operator]
    killed = Path(shutil.copytree(tmp_path / "plain", tmp_path / "killed"))
    for name in ("at-4.json", "metrics.json"):
        (killed / name).unlink()
    shutil.rmtree(killed / "step00000004")
    assert files(killed) == plain  # killed after the save of step 2
    (killed / "metrics.json").unlink()
    capsys.readouterr()
    assert files(killed) == plain  # killed after the last save
    assert "still to do: metrics.json\n" in capsys.readouterr().err
    assert files(killed) == plain
    assert "nothing to do" in capsys.readouterr().err
