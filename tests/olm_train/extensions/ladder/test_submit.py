"""The points of a ladder as jobs: which are submitted, in what order, after what, as which file."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from support.launched import write_project

from olm_data.errors import UsageError
from olm_train.extensions.ladder.command import main
from olm_train.extensions.ladder.config import LadderConfig
from olm_train.extensions.ladder.plan import Rung, plan
from olm_train.extensions.ladder.run import LadderRuns, batch_of
from olm_train.extensions.ladder.submit import command_of, launch_of, path_of
from olm_train.extensions.launch.command import read_launch

from .test_mixtures import write_search
from .test_plan import write_ladder


@pytest.fixture
def project(tmp_path: Path, tiny_mixture: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with launch.yaml and ladder.yaml; its name has a space."""
    import olm_train

    monkeypatch.setattr(olm_train, "__file__", "/x/site-packages/olm_train/__init__.py")
    folder = write_project(tmp_path / "my project", tiny_mixture).parent
    write_ladder(folder, tiny_mixture)
    return folder


def opened(project: Path) -> tuple[LadderRuns, list[Rung]]:
    ladder = LadderConfig.read(project / "ladder.yaml")
    planned = plan(ladder)
    return batch_of(ladder, planned), planned.points


def run(project: Path, *words: str) -> Result:
    given = ["run", str(project / "ladder.yaml"), str(project / "launch.yaml"), "--to", "slurm"]
    return CliRunner().invoke(main, [*given, *words])


def slurm_says(folder: Path, monkeypatch: pytest.MonkeyPatch, queue: str) -> Path:
    """Have a Slurm that keeps what is submitted: a line each in the returned file."""
    called = folder / "called"
    called.write_text("")
    (folder / "bin").mkdir(exist_ok=True)
    for name, lines in {
        "squeue": f"cat <<'E'\n{queue}E",
        "sbatch": f"echo \"$*\" >> '{called}'\nwc -l < '{called}'",
    }.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=":")
    return called


def test_a_fork_waits_for_the_job_of_its_trunk_if_that_has_one(project: Path) -> None:
    batch, _ = opened(project)
    trunk, fork = batch.tasks[:2]
    assert fork.begins == trunk.name
    file = str(project / "ladder" / f"{fork.name}.slurm.sbatch")
    assert command_of(batch, fork, {}) == ["sbatch", "--parsable", file]
    jobs = {str(path_of(batch, trunk.name)): "17"}
    waits = ["--dependency=afterok:17", "--kill-on-invalid-dep=yes"]
    assert command_of(batch, fork, jobs) == ["sbatch", "--parsable", *waits, file]
    assert command_of(batch, trunk, jobs)[2:] == [str(path_of(batch, trunk.name))]


def test_a_job_is_launched_as_launch_yaml_says_with_the_options_of_its_point(project: Path) -> None:
    batch, rungs = opened(project)
    launch = replace(read_launch(str(project / "launch.yaml")), name="a" * 40)
    task, rung = batch.tasks[0], rungs[0]
    found = launch_of(launch, batch, task)
    assert tuple(found.options) == rung.options
    assert found.name == "a" * 31 + "-" + rung.digest[:8]
    assert found.slurm.options == {"output": f"{project}/ladder/{task.name}-%j.log"}
    mine = replace(launch, slurm=replace(launch.slurm, options={"output": "x", "time": 5}))
    assert launch_of(mine, batch, task).slurm.options == {"output": "x", "time": 5}
    for other in ({"train": __file__}, {"options": ["--parallel=auto"]}):
        with pytest.raises(UsageError, match="train its base as it is"):
            launch_of(replace(launch, **other), batch, task)


def test_a_dry_run_prints_what_would_be_submitted_and_leaves_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, _ = opened(project)
    called = slurm_says(project.parent, monkeypatch, "")
    before = sorted(project.parent.rglob("*"))
    done = run(project, "--dry-run")
    assert done.exit_code == 0, done.output
    _, *files = re.split(r"^# (?=sbatch )", done.stdout, flags=re.MULTILINE)
    assert len(files) == len(batch.tasks) == 9
    for task, file in zip(batch.tasks, files, strict=True):
        command, _, text = file.partition("\n")
        assert f"{task.name}.slurm.sbatch" in command
        waits = f"--dependency=afterok:{task.begins} "
        assert (waits in command) == bool(task.begins), command
        assert re.search(r"^#SBATCH --output='.*/my project/ladder/n.*-%j\.log'$", text, re.M)
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert sorted(project.parent.rglob("*")) == before
    assert called.read_text() == ""


def test_what_is_trained_or_in_the_queue_is_not_submitted(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, rungs = opened(project)
    (project / "ladder").mkdir()
    points = [
        {name: getattr(rung, name) for name in ("name", "digest", "parameters", "tokens")}
        | {"flops": rung.whole_flops, "lr": rung.lr, "batch": rung.batch, "loss": 3.0}
        for rung in rungs[3:]
    ]
    lines = "".join(json.dumps(point) + "\n" for point in points)
    (project / "ladder" / "ladder.jsonl").write_text(lines)
    trunk, middle, short = batch.tasks[:3]
    queue = f"7 /elsewhere/{middle.name}.slurm.sbatch\n31 {path_of(batch, trunk.name)}\n"
    called = slurm_says(project.parent, monkeypatch, queue)
    done = run(project)
    assert done.exit_code == 0, done.output
    wanted = [
        command_of(batch, task, {str(path_of(batch, trunk.name)): "31"}) for task in batch.tasks
    ]
    assert called.read_text().splitlines() == [" ".join(words[1:]) for words in wanted[1:3]]
    assert f"job 2: {short.name}" in done.stderr
    assert "2 jobs submitted, 1 in the queue before" in done.stderr
    for task in (middle, short):
        text = path_of(batch, task.name).read_text()
        (digest,) = re.findall(r"--digest=(\w+)", text)
        train = yaml.safe_load((project.parent / "snapshots" / digest / "train.yaml").read_text())
        assert train["trainer"]["save_folder"] == f"{project}/ladder/{task.name}"
        assert train["trainer"]["load_path"].startswith(f"{project}/ladder/{trunk.name}/step")


def test_a_mixture_is_mixed_before_its_job_and_not_by_a_dry_run(
    project: Path, tiny_mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = write_search(project, tiny_mixture, points=5)
    words = ["mix", str(search), str(project / "launch.yaml"), "--to", "slurm"]
    called = slurm_says(project.parent, monkeypatch, "")
    dry = CliRunner().invoke(main, [*words, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    commands = [line.removeprefix("# sbatch ") for line in dry.stdout.splitlines() if line]
    assert len(commands) == 5
    assert not (project / "search").exists()
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert called.read_text().replace("\n", "|").count("|") == 5
    for mine, submitted in zip(commands, called.read_text().splitlines(), strict=True):
        assert mine.replace("'", "") == submitted
    snapshots = [
        json.loads(p.read_text()) for p in project.parent.glob("snapshots/*/snapshot.json")
    ]
    assert len({each["lock"] for each in snapshots}) == 5
    assert {Path(each["mixture"]).parent for each in snapshots} == {project / "search/mixtures"}


@pytest.mark.parametrize(
    "words", [["--to", "slurm"], ["launch.yaml"], ["launch.yaml", "--dry-run"]]
)
def test_jobs_need_both_a_place_and_a_launch_file(project: Path, words: list[str]) -> None:
    done = CliRunner().invoke(main, ["run", str(project / "ladder.yaml"), *words])
    assert isinstance(done.exception, (UsageError, SystemExit))
    assert "both --to and LAUNCH.yaml" in f"{done.exception} {done.output}"
