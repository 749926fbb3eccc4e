"""Training reads a pushed dataset where it lies on the hub, at a commit, and gets the same rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from support.command import olm_data
from support.hub_stub import HubStub
from support.runs import config_values, metrics, run

MIXTURE = """\
version: 1
seed: 5
sequence_length: 32
sources:
  prose: {{data: "{data}", max_epochs: 4}}
stages:
  - {{name: main, epochs: {{prose: 2}}}}
"""
SHORT = (
    "--trainer.callbacks.lm_evaluator.enabled=false",
    "--trainer.callbacks.checkpointer.enabled=false",
    "--trainer.hard_stop={value: 2, unit: steps}",
)


@pytest.mark.slow
def test_a_run_on_the_hub_is_that_on_the_disk(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_mixture.parent / "prose", tmp_path / "prose")
    (tmp_path / "hub").mkdir()
    with HubStub(tmp_path / "hub").running() as stub:
        for name, value in stub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        pushed = olm_data("push", tmp_path / "prose", "hf://datasets/lab/prose", "--json")
        assert pushed.returncode == 0, pushed.stderr
        commit = json.loads(pushed.stdout)["commit"]
        for name, data in (
            ("disk", str(tmp_path / "prose")),
            ("hub-run", f"hf://datasets/lab/prose@{commit}"),
        ):
            (tmp_path / f"{name}.yaml").write_text(MIXTURE.format(data=data))
            made = olm_data("mix", tmp_path / f"{name}.yaml")
            assert made.returncode == 0, made.stderr
            values = config_values(tmp_path / f"{name}.lock.json", tmp_path / name)
            values["data_loader"]["cache"] = {"folder": str(tmp_path / "cache")}
            (tmp_path / f"train-{name}.yaml").write_text(yaml.safe_dump(values))
            done = run(tmp_path / f"train-{name}.yaml", *SHORT)
            assert done.returncode == 0, done.stderr
    one, two = (
        [line["train/CE loss"] for line in metrics(tmp_path / name) if "train/CE loss" in line]
        for name in ("disk", "hub-run")
    )
    assert one
    assert one == two
