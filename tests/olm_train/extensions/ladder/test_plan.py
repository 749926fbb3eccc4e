"""What a ladder costs and tells before it is trained, and its points as jobs of Slurm."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result
from support.launched import write_project
from support.runs import MANIFEST, config_values

import olm_data
from olm_data.errors import InputError, UsageError
from olm_data.printing import lines
from olm_train.extensions.ladder.command import main
from olm_train.extensions.ladder.config import LadderConfig
from olm_train.extensions.ladder.design import Design
from olm_train.extensions.ladder.forecast import forecast
from olm_train.extensions.ladder.law import EPOCH, fit
from olm_train.extensions.ladder.plan import Rung, plan, resolved
from olm_train.extensions.ladder.run import LadderRuns, batch_of
from olm_train.extensions.ladder.submit import command_of, launch_of, path_of
from olm_train.extensions.launch.command import read_launch
from olm_train.run.dry_run import describe

from .test_fit import SIZES, TOKENS, runs_of
from .test_mixtures import write_search


def write_ladder(folder: Path, lock: Path, **fields: Any) -> str:
    """Write a ladder of three widths and three lengths, WSD with decays of a quarter."""
    base = config_values(lock, folder / "base")
    wsd = {"name": "wsd", "warmup": 2, "decay_fraction": 0.25}
    base["train_module"]["scheduler"] = wsd
    (folder / "train.yaml").write_text(yaml.safe_dump(base))
    tokens = [{"value": value, "unit": "tokens"} for value in (1024, 2048, 4096)]
    given: dict[str, Any] = {
        "base": "train.yaml",
        "folder": "ladder",
        "sizes": [{"model.d_model": width} for width in (8, 16, 32)],
        "tokens": tokens,
        **fields,
    }
    path = folder / "ladder.yaml"
    path.write_text(yaml.safe_dump(given))
    return str(path)


def test_predicted_errors_are_those_that_fits_have() -> None:
    design = Design(SIZES, TOKENS, EPOCH, 0.003)
    found = np.array([fit(runs_of(EPOCH, 0.003, seed)) for seed in range(60)])
    errors = design.errors()
    assert np.std(found[:, 2]) / EPOCH.alpha == pytest.approx(errors["alpha"], rel=0.35)
    assert np.std(found[:, 4]) / EPOCH.beta == pytest.approx(errors["beta"], rel=0.35)
    (slope,) = design.slopes(np.array([7e9]), np.array([140e9]))
    forecast_error = np.sqrt(slope @ design.covariance() @ slope)
    assert forecast_error == pytest.approx(0.0075, abs=0.0005)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [(0 * SIZES + 1e9, "same tokens"), (20 * SIZES, "same tokens for each parameter")],
)
def test_a_design_that_keeps_the_exponents_together_says_what_does(
    tokens: np.ndarray, why: str
) -> None:
    assert any(why in text for text in Design(SIZES, tokens).problems())


def test_the_point_to_add_is_the_cheapest_that_separates_them() -> None:
    sizes = np.array([2e7, 6e7, 2e8, 6e8, 6e8])
    design = Design(sizes, 20 * sizes * [1, 1, 1, 1, 4], noise=0.001)
    candidates = [(n, n * r) for n in (2e7, 6e7) for r in (5.0, 80.0, 320.0)]
    best = design.cheapest(candidates)
    assert best is not None
    cheaper = [c for c in candidates if c[0] * c[1] < best[0] * best[1]]
    assert all(design.with_run(*each).problems() for each in cheaper)
    assert design.with_run(*best).information() > design.information()


def test_points_have_sizes_costs_and_trunks(tiny_mixture: Path, tmp_path: Path) -> None:
    found = plan(LadderConfig.read(write_ladder(tmp_path, tiny_mixture)))
    assert len(found.points) == 9
    trunk, middle, short = found.points[:3]
    assert (trunk.steps, middle.steps, short.steps) == (16, 8, 4)
    assert (trunk.first, middle.first, short.first) == (0, 6, 3)
    assert middle.begins == short.begins == trunk.name
    assert middle.flops == pytest.approx(trunk.flops / 8)
    assert middle.whole_flops == pytest.approx(trunk.flops / 2)
    assert trunk.flops > 6 * trunk.parameters * 0.5 * trunk.tokens
    assert found.flops == pytest.approx(sum(p.flops for p in found.points))
    head = next(line.split() for line in lines(found) if "FLOPs" in line)
    assert head == ["name", "parameters", "tokens", "steps", "FLOPs", "hours", "from"]


def test_without_a_stable_phase_each_point_begins_at_the_first_step(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    path = write_ladder(tmp_path, tiny_mixture)
    base = yaml.safe_load((tmp_path / "train.yaml").read_text())
    base["train_module"]["scheduler"] = {"name": "cosine_with_warmup", "warmup": 2}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(base))
    assert {point.begins for point in plan(LadderConfig.read(path)).points} == {""}


def test_another_configuration_is_another_point(tiny_mixture: Path, tmp_path: Path) -> None:
    path = write_ladder(tmp_path, tiny_mixture)
    before = plan(LadderConfig.read(path)).points
    base = yaml.safe_load((tmp_path / "train.yaml").read_text())
    base["train_module"]["optim"]["weight_decay"] = 0.2
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(base))
    after = plan(LadderConfig.read(path)).points
    assert not {p.digest for p in before} & {p.digest for p in after}
    assert not {p.name for p in before} & {p.name for p in after}


def test_one_length_is_refused_with_the_point_to_add(tiny_mixture: Path, tmp_path: Path) -> None:
    one = [{"value": 4096, "unit": "tokens"}]
    with pytest.raises(InputError, match="cannot separate") as caught:
        plan(LadderConfig.read(write_ladder(tmp_path, tiny_mixture, tokens=one)))
    assert "same tokens" in str(caught.value)
    assert "parameters x" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"tokens": [{"value": 3, "unit": "epochs"}]}, "in tokens or chinchilla"),
        ({"tokens": [{"value": 10**6, "unit": "tokens"}]}, "the mixture lock holds"),
        ({"dataset": "hold"}, "judged by a held-out set"),
        ({"sizes": [{"model.d_model": 8}, {"model.d_model": 8}]}, "the same run"),
        ({"sizes": []}, "sizes"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tiny_mixture: Path, tmp_path: Path, fields: dict[str, Any], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        plan(LadderConfig.read(write_ladder(tmp_path, tiny_mixture, **fields)))


def test_a_run_is_as_long_and_costs_as_much_as_its_dry_run_says(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    """Where it stops before its end, skips rows, and has phases of other sequence lengths."""
    manifest = yaml.safe_load(MANIFEST)
    manifest["stages"][0]["sequence_length"] = 8
    for source in manifest["sources"].values():
        source["data"] = str(tiny_mixture.parent / source["data"])
    (tmp_path / "phased.yaml").write_text(yaml.safe_dump(manifest))
    lock = tmp_path / "phased.lock.json"
    olm_data.mix(tmp_path / "phased.yaml", lock)
    ladder = LadderConfig.read(write_ladder(tmp_path, tiny_mixture))
    Path(ladder.folder).mkdir()
    copy(Path(__file__).with_name("ladder.jsonl"), ladder.folder)
    options = [f"--data_loader.mixture={lock}", "--data_loader.skip=[[0, 8]]"]
    options += ["--trainer.hard_stop={value: 20, unit: steps}"]
    config = resolved(ladder.base, tuple(options))
    said = describe(config, 1)
    found = forecast(ladder, ladder.base, tuple(options), far=True)
    assert found.tokens == 20 * 256
    assert f"20 steps of 256 tokens: {found.tokens:,} tokens" in said
    assert f"{found.flops:.3e} in all" in said
    whole = forecast(ladder, ladder.base, tuple(options[:2]), far=True)
    assert whole.tokens == 23 * 256


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
    for name, does in {
        "squeue": f"cat <<'E'\n{queue}E",
        "sbatch": f"echo \"$*\" >> '{called}'\nwc -l < '{called}'",
    }.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
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
