"""`olm-train launch` and the snapshots it takes: complete, named by what is in them, or refused."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result
from support.launched import git, write_project
from support.runs import config_values

from olm_data.config.values import Values
from olm_data.errors import UsageError, ValidationError
from olm_train.extensions.launch.command import main, read_launch, with_absolute_paths
from olm_train.extensions.launch.snapshot import (
    Snapshot,
    Taken,
    installed,
    take,
    verify,
    verify_surroundings,
)
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


@pytest.fixture
def project(config: Path) -> Path:
    """Its folder, in git; the package counts as installed, so that only its files are copied."""
    return config.parent


def taken(project: Path, **more: Any) -> Taken:
    facts = Snapshot(
        files={}, paths=(), packages=("a==1",), mixture="m", lock="l", save_folder="s", work_dir="w"
    )
    options: dict[str, Any] = {"untracked": (), "snapshots": project.parent / "snapshots"}
    return take(project, train="seed: 1\n", facts=facts, **options | more)


def test_the_same_files_have_the_same_digest_and_other_bytes_another(project: Path) -> None:
    first = taken(project)
    assert taken(project).digest == first.digest
    (project / "said.py").write_text("changed, not committed\n")
    second = taken(project)
    assert second.digest != first.digest
    copy = Path(second.folder) / "code/0-project/said.py"
    assert copy.read_text() == "changed, not committed\n"
    assert "code one" in (Path(first.folder) / "code/0-project/said.py").read_text()
    (project / "said.py").chmod(0o755)
    assert taken(project).digest not in (first.digest, second.digest)


def test_a_dry_run_knows_the_digest_and_leaves_nothing(project: Path) -> None:
    digest = taken(project, keep=False).digest
    assert not (project.parent / "snapshots").exists()
    assert taken(project).digest == digest


def test_a_removed_file_is_gone_and_a_link_stays_a_link(project: Path) -> None:
    (project / "link").symlink_to("said.py")
    git(project, "add", "link")
    (project / "launch.yaml").unlink()
    found = taken(project)
    assert {*found.snapshot.files} == {
        "train.yaml", "code/0-project/link", "code/0-project/said.py", "code/0-project/train.yaml",
    }  # fmt: skip
    assert os.readlink(Path(found.folder) / "code/0-project/link") == "said.py"


def test_untracked_files_are_in_it_if_they_are_named_and_else_modules_are_told(
    project: Path,
) -> None:
    (project / "new.py").write_text("x = 1\n")
    (project / "words").mkdir()
    (project / "words" / "a.txt").write_text("a\n")
    without = taken(project)
    assert without.notes == ("not in the snapshot, as git does not track them: new.py",)
    found = taken(project, untracked=["new.py", "words"])
    assert found.notes == ()
    assert {*found.snapshot.files} - {*without.snapshot.files} == {
        "code/0-project/new.py", "code/0-project/words/a.txt",
    }  # fmt: skip
    for name in ("no.py", "../outside"):
        with pytest.raises(UsageError, match="is not a file below"):
            taken(project, untracked=[name])


def test_modules_are_found_beside_launch_yaml_and_at_the_root(project: Path) -> None:
    inner = project / "runs" / "first"
    inner.mkdir(parents=True)
    assert taken(inner).snapshot.paths == ("code/0-project/runs/first", "code/0-project")


def test_a_folder_outside_of_git_has_what_is_named(tmp_path: Path, project: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "mine.py").write_text("x = 1\n")
    found = taken(plain, untracked=["mine.py"])
    assert {*found.snapshot.files} == {"train.yaml", "code/0-plain/mine.py"}


def test_a_package_from_nowhere_is_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import olm_train

    monkeypatch.setattr(olm_train, "__file__", str(tmp_path / "unpacked/olm_train/__init__.py"))
    with pytest.raises(UsageError, match="neither installed nor in a git checkout"):
        taken(project)


@pytest.mark.parametrize("change", ["edit", "add", "remove", "manifest", "all"])
def test_a_changed_snapshot_is_refused(project: Path, change: str) -> None:
    found = taken(project)
    folder = Path(found.folder)
    said = folder / "code/0-project/said.py"
    assert verify(folder, found.digest) == found.snapshot
    if change == "edit":
        said.write_text("edited\n")
    elif change == "add":
        (folder / "code/0-project/torch.py").write_text("")
    elif change == "remove":
        said.unlink()
    elif change == "manifest":
        path = folder / "snapshot.json"
        path.write_text(path.read_text().replace("a==1", "a==2"))
    else:
        folder.rename(folder.parent / "elsewhere")
    with pytest.raises(ValidationError, match=r"changed|not the snapshot|is gone"):
        verify(folder, found.digest)


def test_other_packages_or_another_lock_are_refused(tiny_mixture: Path) -> None:
    from olm_data.mixture.lock import Lock

    lock = Lock.read(str(tiny_mixture)).digest
    here = Snapshot(
        files={}, paths=(), packages=installed(), mixture=str(tiny_mixture), lock=lock,
        save_folder="s", work_dir="w",
    )  # fmt: skip
    verify_surroundings(here)
    verify_surroundings(msgspec.structs.replace(here, packages=()))  # an image has its own
    with pytest.raises(ValidationError, match=r"1 packages are not those .*: torch==0"):
        verify_surroundings(msgspec.structs.replace(here, packages=(*here.packages, "torch==0")))
    with pytest.raises(ValidationError, match="mixture lock is not that"):
        verify_surroundings(msgspec.structs.replace(here, lock="other"))
