"""The configuration under another name, and the data files: in the run's folder and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.own_data import Own
from support.runs import build_trainer

from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.load import open_checkpoint
from olm_train.distributed.world import World
from olm_train.extensions.monitors.config_saver import ConfigSaverCallback, data_paths

PREFIX = "--trainer.callbacks.config_saver"
SHORT = (
    "--trainer.hard_stop={value: 3, unit: steps}",
    "--trainer.callbacks.lm_evaluator.enabled=false",
)


def run(mixture: Path, folder: Path, *options: str) -> dict[str, set[str]]:
    """The files of a run of 3 steps, and of its checkpoint, that are there because of options."""
    build_trainer(mixture, folder, *SHORT, *(f"{PREFIX}.{option}" for option in options)).fit()
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
    assert run(tiny_mixture, tmp_path, "enabled=true") == {"run": set(), "checkpoint": set()}


def test_the_configuration_lies_under_its_fname_too(tiny_mixture: Path, tmp_path: Path) -> None:
    found = run(tiny_mixture, tmp_path / "a", "fname=experiment.json")
    assert found == {"run": {"experiment.json"}, "checkpoint": {"experiment.json"}}
    for place in (tmp_path / "a", tmp_path / "a" / "step00000003"):
        content = (place / "experiment.json").read_bytes()
        assert content == (place / "config.json").read_bytes()
        assert json.loads(content)["model"]["d_model"] == 16


@pytest.mark.parametrize(
    ("options", "name"),
    [([], "data_paths.txt"), (["data_paths_fname=files.txt"], "files.txt")],
)
def test_save_data_paths_names_each_token_file(
    tiny_mixture: Path, tmp_path: Path, options: list[str], name: str
) -> None:
    found = run(tiny_mixture, tmp_path, "save_data_paths=true", *options)
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
        build_trainer(tiny_mixture, tmp_path, *(f"{PREFIX}.{option}" for option in options))


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
