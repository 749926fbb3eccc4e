"""`olm-train config --diff`: what differs from the configuration of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import write_config

from olm_data.config.values import Values
from olm_train.distributed.world import World
from olm_train.run.command import print_config
from olm_train.run.config import RunConfig


@pytest.fixture
def config(tiny_mixture: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")


def test_it_names_the_fields_that_differ_from_a_run(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = Values.read(config)
    for option in ("--trainer.hard_stop={value: 1, unit: steps}", "--seed=7"):
        values.override(option)
    RunConfig.resolve(values).build(World()).fit()
    folder = tmp_path / "run"
    assert print_config([str(config), "--diff", str(folder), "--train_module.optim.lr=0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "seed: 7 -> 1",
        "train_module.optim.lr: 0.01 -> 0.5",
        "trainer.hard_stop: {'value': 1, 'unit': 'steps'} -> None",
    ]
    checkpoint = next(folder.glob("step*"))  # saved with each checkpoint too
    same = [f"--diff={checkpoint}", "--seed=7", "--trainer.hard_stop={value: 1, unit: steps}"]
    assert print_config([str(config), *same]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_it_takes_what_an_older_release_did_not_save_as_the_default(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = RunConfig.resolve(Values.read(config)).as_dict()
    del saved["train_module"]["compile_model"]
    (tmp_path / "old.json").write_text(json.dumps(saved))
    assert print_config([str(config), f"--diff={tmp_path / 'old.json'}"]) == 0
    assert capsys.readouterr().out == "no difference\n"
    saved["gone"] = 3
    (tmp_path / "old.json").write_text(json.dumps(saved))
    assert print_config([str(config), f"--diff={tmp_path / 'old.json'}"]) == 0
    out = capsys.readouterr().out
    assert "saved by another release: unknown field gone" in out
    assert "gone: 3 -> None" in out


def test_a_run_without_a_saved_configuration_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_config([str(config), "--diff=none"]) == 4
    assert "no saved configuration" in capsys.readouterr().err
