"""`olm-train launch`: what is printed, what is submitted, and what is refused before that."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from support.launched import write_project
from support.runs import config_values

from olm_data.config.values import Values
from olm_train.extensions.launch.command import main, read_launch, with_absolute_paths
from olm_train.run.config import RunConfig


def launch(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def config(tmp_path: Path, tiny_mixture: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import olm_train

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(olm_train, "__file__", "/x/site-packages/olm_train/__init__.py")
    k8s = {"image": "olm:1", "claims": {"shared": str(tmp_path)}}
    return write_project(tmp_path / "project", tiny_mixture, k8s=k8s, dstack={"image": "olm:1"})


@pytest.mark.parametrize("to", ["local", "slurm", "k8s", "skypilot", "dstack"])
def test_a_dry_run_prints_the_file_and_leaves_nothing(config: Path, to: str) -> None:
    done = launch(config, "--to", to, "--dry-run")
    assert done.exit_code == 0, done.output
    digest = re.search(r"--digest=(\w+)", done.stdout)
    assert digest
    assert done.stdout.startswith(f"# {config.parents[1]}/snapshots/{digest[1]}.")
    assert not (config.parents[1] / "snapshots").exists()
    again = launch(config, "--to", to, "--dry-run")
    assert again.stdout == done.stdout


@pytest.mark.parametrize(
    ("to", "program"),
    [("slurm", "sbatch"), ("k8s", "kubectl"), ("skypilot", "sky"), ("dstack", "dstack")],
)
def test_it_is_submitted_by_the_program_of_the_scheduler(
    config: Path, to: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    called = tmp_path / "called"
    (tmp_path / "bin" / program).write_text(f'#!/bin/sh\necho "$@" > {called}\n')
    (tmp_path / "bin" / program).chmod(0o755)
    done = launch(config, "--to", to)
    assert done.exit_code == 0, done.output
    path = Path(called.read_text().split()[-1])
    assert path.read_text() in launch(config, "--to", to, "--dry-run").stdout
    (tmp_path / "bin" / program).write_text("#!/bin/sh\nexit 4\n")
    done = launch(config, "--to", to)
    assert done.exit_code == 2
    assert f"{program} refused: exit code 4" in done.stderr


def test_a_program_that_is_not_here_is_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    done = launch(config, "--to", "dstack")
    assert done.exit_code == 5
    assert "there is no dstack here" in done.stderr


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nodez": 2}, "unknown field nodez"),
        ({"name": "My_Run"}, "name is"),
        ({"options": ["--trainer.save_foldr=x"]}, "save_foldr"),
        ({"train": "none.yaml"}, "none.yaml"),
        ({"ranks_per_node": 2, "gpus_per_node": 8}, "ranks_per_node"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_queued(
    config: Path, change: dict[str, object], says: str
) -> None:
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | change))
    done = launch(config, "--to", "slurm")
    assert done.exit_code == 2
    assert says in done.stderr
    assert not (config.parents[1] / "snapshots").exists()


def test_options_are_in_the_snapshot_and_paths_count_from_no_folder(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    given = config_values(tiny_mixture, Path("runs/a")) | {"parallel": "auto"}
    text = yaml.safe_dump(given)
    values = Values.parse(text, "train.yaml", folder=tmp_path)
    kept = with_absolute_paths(given, RunConfig.resolve(values).as_dict())
    assert kept["trainer"]["save_folder"] == str(tmp_path / "runs/a")
    assert kept["parallel"] == "auto"
    assert {*kept["model"]} == {*given["model"]}
    here = RunConfig.resolve(Values(kept, folder="/"))
    there = RunConfig.resolve(Values.parse(text, "train.yaml", folder=tmp_path))
    assert here.as_dict() == there.as_dict()


def test_the_launch_files_of_pipelines_are_ones(repository: Path) -> None:
    found = sorted((repository / "pipelines").glob("*/launch.yaml"))
    assert [path.parent.name for path in found] == ["slurm"]
    for path in found:
        config = read_launch(str(path))
        assert Path(config.train) == path.with_name("train.yaml")
        assert config.nodes * config.ranks == 32
