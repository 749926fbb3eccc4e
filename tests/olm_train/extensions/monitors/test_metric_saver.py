"""Files with the latest metrics, the configuration and the data paths."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.own_data import Own
from support.runs import build_trainer, metrics

from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.load import open_checkpoint
from olm_train.distributed.world import World
from olm_train.extensions.monitors.config_saver import ConfigSaverCallback, data_paths

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


CONFIG = "--trainer.callbacks.config_saver"
SHORT = (
    "--trainer.hard_stop={value: 3, unit: steps}",
    "--trainer.callbacks.lm_evaluator.enabled=false",
)


def kept(mixture: Path, folder: Path, *options: str) -> dict[str, set[str]]:
    """The files of a run of 3 steps, and of its checkpoint, that are there because of options."""
    build_trainer(mixture, folder, *SHORT, *(f"{CONFIG}.{option}" for option in options)).fit()
    checkpoint = folder / "step00000003"
    open_checkpoint(checkpoint, World())  # whole, with what was added
    usual = {"config.json", "environment.json", "train.json", "manifest.json", "latest"}
    usual |= {"mixture.lock.json", "tokenizer.json", "lease-000001.json"}
    return {
        name: {p.name for p in place.iterdir() if p.suffix in (".json", ".txt")} - usual
        for name, place in (("run", folder), ("checkpoint", checkpoint))
    }


def test_nothing_more_than_config_json_by_default(tiny_mixture: Path, tmp_path: Path) -> None:
    assert ConfigSaverCallback().fname == "config.json"
    assert kept(tiny_mixture, tmp_path, "enabled=true") == {"run": set(), "checkpoint": set()}


def test_the_configuration_lies_under_its_fname_too(tiny_mixture: Path, tmp_path: Path) -> None:
    found = kept(tiny_mixture, tmp_path / "a", "fname=experiment.json")
    assert found == {"run": {"experiment.json"}, "checkpoint": {"experiment.json"}}
    for place in (tmp_path / "a", tmp_path / "a" / "step00000003"):
        content = (place / "experiment.json").read_bytes()
        assert content == (place / "config.json").read_bytes()
        assert json.loads(content)["model"]["d_model"] == 16


@pytest.mark.parametrize(
    ("options", "name"), [([], "data_paths.txt"), (["data_paths_fname=files.txt"], "files.txt")]
)
def test_save_data_paths_names_each_token_file(
    tiny_mixture: Path, tmp_path: Path, options: list[str], name: str
) -> None:
    found = kept(tiny_mixture, tmp_path, "save_data_paths=true", *options)
    assert found == {"run": {name}, "checkpoint": {name}}
    lines = (tmp_path / "step00000003" / name).read_text().splitlines()
    assert lines == data_paths(Lock.read(tiny_mixture).open_datasets(verify="off"))
    assert {Path(line).parent.name for line in lines} == {"prose", "code"}
    assert all(Path(line).is_file() for line in lines)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["data_paths_fname=files.txt"], "no effect without save_data_paths"),
        (["fname=metrics.jsonl"], "fname"),
        (["fname=environment.json"], "environment.json is a file of each run"),
        (["fname=../up.json"], "fname"),
        (["save_data_paths=true", "data_paths_fname=config.json"], "is a file of each run"),
    ],
)
def test_names_that_cannot_be_are_refused(
    tiny_mixture: Path, tmp_path: Path, options: list[str], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        build_trainer(tiny_mixture, tmp_path, *(f"{CONFIG}.{option}" for option in options))


def test_data_paths_need_a_lock() -> None:
    saver = ConfigSaverCallback(save_data_paths=True)
    saver.trainer = type("Run", (), {"data_loader": Own()})()  # type: ignore[assignment]
    with pytest.raises(UsageError, match="save_data_paths needs a mixture lock"):
        saver.post_attach()


class Adds(Callback):
    """Wants a file in each checkpoint."""

    def __init__(self, name: str) -> None:
        self.name = name

    def documents(self) -> Mapping[str, bytes]:
        return {self.name: b"mine"}


@pytest.mark.parametrize("name", ["train.json", "latest", "a/b", ".hidden", "manifest.json", ""])
def test_a_callback_cannot_take_the_place_of_a_file_of_the_checkpoint(
    tiny_mixture: Path, tmp_path: Path, name: str
) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path, *SHORT, callbacks={"adds": Adds(name)})
    with pytest.raises(UsageError, match="'adds' cannot give each checkpoint a file"):
        trainer.fit()


def test_two_callbacks_cannot_write_one_file(tiny_mixture: Path, tmp_path: Path) -> None:
    both = {"one": Adds("notes.txt"), "two": Adds("notes.txt")}
    trainer = build_trainer(tiny_mixture, tmp_path, *SHORT, callbacks=both)
    with pytest.raises(UsageError, match="'two' cannot give each checkpoint a file "):
        trainer.fit()
