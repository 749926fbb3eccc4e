"""The files that start a run, by scheduler: pure functions, and no SDK.

    LaunchConfig, snapshot --job--> {file: text}, and the command that submits it

Each starts one agent a node (`agent.py`), whose exit code says what follows (`exit_codes.py`): 75
the job is started again, any other one it is not. Sources: sbatch(1) of Slurm 22.05, JobSet
v1alpha2 and the pod failure policy of Kubernetes, the task schemas of SkyPilot 0.14 and dstack
0.22.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from typing import Any

import yaml

from olm_data.config.dump import as_dict
from olm_data.errors import UsageError
from olm_train.distributed.preempt import REQUEUE_EXIT_CODE
from olm_train.extensions.launch.config import LaunchConfig
from olm_train.extensions.launch.exit_codes import FINAL
from olm_train.extensions.launch.snapshot import Taken

SCHEDULERS = ("local", "slurm", "k8s", "skypilot", "dstack")
IMAGES = ("k8s", "skypilot", "dstack")
"""Those whose nodes have packages of their own, which are not those of this machine."""
AGENT = "olm_train.extensions.launch.agent"
REMOTE = "olm-snapshot"
"""Where SkyPilot and dstack put the snapshot."""
POD = "node"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is submitted.

    Attributes:
        name: of the one file.
        text: of it.
        command: program and options that take the file's path.
    """

    name: str
    text: str
    command: tuple[str, ...]


def job(to: str, config: LaunchConfig, taken: Taken) -> Job:
    """Return the file and the command that start a run.

    Raises:
        UsageError: the scheduler needs something that the configuration lacks.
    """
    makers = {
        "local": _local,
        "slurm": _slurm,
        "k8s": _k8s,
        "skypilot": _skypilot,
        "dstack": _dstack,
    }
    return makers[to](config, taken)


def _missing(field: str, why: str, fix: str) -> UsageError:
    return UsageError(f"{field} is missing in launch.yaml", where=field, why=why, fix=fix)


def _environment(config: LaunchConfig, taken: Taken, folder: str) -> list[str]:
    """Return the lines that make a shell run the snapshot's code, at `folder` (a shell word)."""
    paths = ":".join(f"$S/{path}" for path in taken.snapshot.paths)
    lines = [f"S={folder}", f'export PYTHONPATH="{paths}${{PYTHONPATH:+:$PYTHONPATH}}"']
    lines.append("export PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1")
    return lines + [f"export {k}={shlex.quote(v)}" for k, v in config.environment.items()]


def _agent(
    config: LaunchConfig, taken: Taken, *, meet: str, node: str = "", python: str, more: str = ""
) -> str:
    """Return the command of a node's agent. Args: meet: shell word; node: variable with its number,
    from 0."""
    words = [f'{shlex.quote(python)} -m {AGENT} "$S" --digest={taken.digest}']
    words += [f"--nodes={config.nodes} --ranks={config.ranks} --gpus={config.gpus_per_node}"]
    words += [f"--meet={meet}", *([f"--node-from={node}"] if node else [])]
    words += [f"--margin={config.margin}"]
    if config.preflight.enabled:
        options = json.dumps(as_dict(config.preflight), separators=(",", ":"))
        words.append(f"--preflight={shlex.quote(options)}")
    return " \\\n  ".join([*words, *([more] if more else [])])


def _local(config: LaunchConfig, taken: Taken) -> Job:
    if config.nodes > 1:
        raise UsageError(
            "this machine is one node", where="nodes", fix="nodes: 1, or --to slurm for more"
        )
    agent = _agent(config, taken, meet="127.0.0.1:0", python=sys.executable, more="--again")
    lines = ["#!/bin/sh", *_environment(config, taken, shlex.quote(taken.folder)), f"exec {agent}"]
    return Job(name="local.sh", text="\n".join(lines) + "\n", command=("sh",))


_SLURM = """\
# The end of the job as Unix time, if it has one: Slurm before 23.02 does not set it.
end=$(squeue -h -j "$SLURM_JOB_ID" -o %e)
limit=()
if [ "$end" != NONE ]; then
  SLURM_JOB_END_TIME=$(date -d "$end" +%s) || exit 2
  export SLURM_JOB_END_TIME
  limit=(-- --trainer.time_limit=slurm --trainer.time_margin=MARGIN)
fi
# The first node as Slurm itself reaches it, and a port that another job on it does not have.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol -o show node "$first" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
port=$((20000 + SLURM_JOB_ID % 10000))
"""


def _slurm(config: LaunchConfig, taken: Taken) -> Job:
    own = {"job-name": config.name, "nodes": config.nodes, "ntasks-per-node": 1}
    if config.gpus_per_node:
        own["gpus-per-node"] = config.gpus_per_node
    given = config.slurm.options
    if taken_twice := [name for name in given if name in {*own, "requeue"}]:
        raise UsageError(
            f"slurm.options: {taken_twice[0]} is set by the launcher",
            where="slurm.options",
            fix="leave it out; name, nodes and gpus_per_node are fields of launch.yaml",
        )
    options = {"output": "%x-%j.log", "open-mode": "append", "requeue": None, **own, **given}
    agent = _agent(
        config,
        taken,
        meet='"$address:$port"',
        node="SLURM_NODEID",
        python=sys.executable,
        more='"${limit[@]}"',
    )
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{k}" + ("" if v is None else f"={v}") for k, v in options.items()]
    lines += ["set -u", *_SLURM.replace("MARGIN", str(config.margin)).splitlines()]
    lines += _environment(config, taken, shlex.quote(taken.folder))
    lines += [f"srun --wait={config.margin} {agent}", "code=$?"]
    lines += ["# Slurm itself requeues a job that was pre-empted or lost a node."]
    lines += [f'if [ "$code" -eq {REQUEUE_EXIT_CODE} ]; then']
    lines += ['  echo "queued again, to go on from the newest checkpoint"']
    lines += ['  scontrol requeue "$SLURM_JOB_ID"', "fi", 'exit "$code"']
    return Job(name="slurm.sbatch", text="\n".join(lines) + "\n", command=("sbatch", "--parsable"))


def _pods_policies(max_restarts: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod failure policy of the Job, and the failure policy of the JobSet.

    A pod that is disrupted, or ends with 75, fails its Job with a message that says so, and the
    JobSet is made again whatever was counted; a final code ends it. What nobody knows (the node is
    gone, the agent itself was killed) counts.
    """
    reason = {"onJobFailureReasons": ["PodFailurePolicy"]}
    code = {"containerName": POD, "operator": "In"}
    pod = [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {**code, "values": [REQUEUE_EXIT_CODE]}},
        {"action": "FailJob", "onExitCodes": {**code, "values": sorted(FINAL)}},
    ]
    again = [f"exit code {REQUEUE_EXIT_CODE} ", "condition DisruptionTarget "]
    rules = [
        {
            "name": "goesOn",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            **reason,
            "onJobFailureMessagePatterns": again,
        },
        {"name": "wouldFailAgain", "action": "FailJobSet", **reason},
    ]
    return {"rules": pod}, {"maxRestarts": max_restarts, "rules": rules}


def _k8s(config: LaunchConfig, taken: Taken) -> Job:
    k8s = config.k8s
    if k8s is None:
        raise _missing("k8s", "pods need an image", "add `k8s: {image: ..., claims: {NAME: PATH}}`")
    if not any(taken.folder.startswith(place.rstrip("/") + "/") for place in k8s.claims.values()):
        raise UsageError(
            "no claim holds the snapshot",
            where="k8s.claims",
            why=f"pods could not read {taken.folder}",
            fix="mount the volume under the same path here and there, and set snapshots to it",
        )
    agent = _agent(
        config,
        taken,
        meet=f"{config.name}-{POD}-0-0.{config.name}:{config.port}",
        node="JOB_COMPLETION_INDEX",
        python="python",
    )
    script = [*_environment(config, taken, shlex.quote(taken.folder)), f"exec {agent}"]
    limits = {**k8s.resources, **({k8s.gpu: config.gpus_per_node} if config.gpus_per_node else {})}
    volumes = [{"name": n, "persistentVolumeClaim": {"claimName": n}} for n in k8s.claims]
    mounts = [{"name": name, "mountPath": place} for name, place in k8s.claims.items()]
    pod_policy, policy = _pods_policies(k8s.max_restarts)
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": config.margin,
        "containers": [
            {
                "name": POD,
                "image": k8s.image,
                "command": ["sh", "-c", "\n".join(script)],
                "resources": {"limits": limits, "requests": dict(limits)},
                "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
            }
        ],
        "volumes": [*volumes, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
        **k8s.pod,
    }
    labels = {"olm/snapshot": taken.digest}
    task = {
        "parallelism": config.nodes,
        "completions": config.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": pod_policy,
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": config.name, "namespace": k8s.namespace, "labels": labels},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": policy,
            "replicatedJobs": [{"name": POD, "replicas": 1, "template": {"spec": task}}],
        },
    }
    return Job(name="k8s.yaml", text=_yaml(document), command=("kubectl", "apply", "-f"))


def _skypilot(config: LaunchConfig, taken: Taken) -> Job:
    sky, meet = config.skypilot, '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
    agent = _agent(
        config,
        taken,
        meet=f'{meet}:{config.port}"',
        node="SKYPILOT_NODE_RANK",
        python="python",
    )
    recovery = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [REQUEUE_EXIT_CODE]}
    document = {
        "name": config.name,
        "num_nodes": config.nodes,
        "resources": {**sky.resources, "job_recovery": recovery},
        "file_mounts": {**sky.file_mounts, f"~/{REMOTE}": taken.folder},
        **({} if sky.setup is None else {"setup": sky.setup}),
        "run": "\n".join([*_environment(config, taken, f'"$HOME/{REMOTE}"'), f"exec {agent}"]),
    }
    return Job(
        name="skypilot.yaml", text=_yaml(document), command=("sky", "jobs", "launch", "--yes")
    )


def _dstack(config: LaunchConfig, taken: Taken) -> Job:
    dstack = config.dstack
    if dstack is None:
        raise _missing("dstack", "a task needs an image", "add `dstack: {image: ...}`")
    # dstack knows no exit codes: the agents of a job start it again themselves.
    agent = _agent(
        config,
        taken,
        meet=f'"$DSTACK_MASTER_NODE_IP:{config.port}"',
        node="DSTACK_NODE_RANK",
        python="python",
        more="--again",
    )
    script = [*_environment(config, taken, f"/{REMOTE}"), f"exec {agent}"]
    document = {
        "type": "task",
        "name": config.name,
        "image": dstack.image,
        "nodes": config.nodes,
        "files": [f"{taken.folder}:/{REMOTE}"],
        "commands": ["\n".join(script)],
        "resources": dstack.resources,
        "volumes": dstack.volumes,
        "stop_duration": f"{config.margin}s",
        "retry": {
            "on_events": ["no-capacity", "interruption"],
            "duration": f"{dstack.retry_hours}h",
        },
    }
    return Job(name="dstack.yaml", text=_yaml(document), command=("dstack", "apply", "--yes", "-f"))


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
_Dumper.ignore_aliases = lambda self, data: True  # type: ignore[method-assign]


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False)
