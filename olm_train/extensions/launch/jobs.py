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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from olm_data.config.convert import as_dict
from olm_data.errors import UsageError
from olm_train.distributed.preempt import REQUEUE_EXIT_CODE
from olm_train.extensions.launch.config import LaunchConfig
from olm_train.extensions.launch.exit_codes import FINAL
from olm_train.extensions.launch.snapshot import Taken

IMAGES = ("k8s", "skypilot", "dstack")
"""Those whose nodes have packages of their own, which are not those of this machine."""
AGENT = "olm_train.extensions.launch.agent"
REMOTE = "olm-snapshot"
"""Where SkyPilot and dstack put the snapshot."""
POD = "node"
SBATCH = ("sbatch", "--parsable")


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """What is submitted.

    Attributes:
        name: of the one file.
        text: of it.
        command: program and options that take the file's path.
    """

    name: str
    text: str
    command: tuple[str, ...]


def job(to: str, config: LaunchConfig, taken: Taken) -> LaunchJob:
    """Return the file and the command that start a run.

    Raises:
        UsageError: the scheduler needs something that the configuration lacks.
    """
    return _MAKERS[to](config, taken)


def _script(config: LaunchConfig, taken: Taken, run: str, meet: str, *more: str) -> list[str]:
    """Return the lines of a shell that run the agent of a node; `$S` is the snapshot there.

    Args:
        run: what starts Python there.
        meet: HOST:PORT of the first node, a shell word.
        more: options of the agent.
    """
    paths = ":".join(f"$S/{path}" for path in taken.snapshot.paths)
    wanted = json.dumps(as_dict(config.preflight), separators=(",", ":"))
    words = [
        f'{run} -m {AGENT} "$S" --digest={taken.digest}',
        f"--nodes={config.nodes} --ranks={config.ranks} --gpus={config.gpus_per_node}",
        f"--meet={meet} --margin={config.margin}",
        *([f"--preflight={shlex.quote(wanted)}"] if config.preflight.enabled else []),
        *more,
    ]
    return [
        f'export PYTHONPATH="{paths}${{PYTHONPATH:+:$PYTHONPATH}}"',
        "export PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1",
        *(f"export {name}={shlex.quote(value)}" for name, value in config.environment.items()),
        " \\\n  ".join(words),
    ]


def _local(config: LaunchConfig, taken: Taken) -> LaunchJob:
    if config.nodes > 1:
        raise UsageError("this machine is one node", where="nodes", fix="take another --to")
    run = f"exec {shlex.quote(sys.executable)}"
    lines = ["#!/bin/sh", f"S={shlex.quote(taken.folder)}"]
    lines += _script(config, taken, run, "127.0.0.1:0", "--again")
    return LaunchJob(name="local.sh", text="\n".join(lines) + "\n", command=("sh",))


_SLURM = """\
# The end of the job as Unix time, if it has one: Slurm before 23.02 does not set it.
end=$(squeue -h -j "$SLURM_JOB_ID" -o %e)
limit=()
if [ "$end" != NONE ]; then
  SLURM_JOB_END_TIME=$(date -d "$end" +%s) || exit 2
  export SLURM_JOB_END_TIME
  limit=(-- --trainer.time_limit=slurm --trainer.time_margin="$margin")
fi
# The first node as Slurm itself reaches it, and a port that another job on it does not have.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol -o show node "$first" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
port=$((20000 + SLURM_JOB_ID % 10000))
"""
_SLURM_END = f"""\
code=$?
# Slurm itself requeues a job that was pre-empted or lost a node.
if [ "$code" -eq {REQUEUE_EXIT_CODE} ]; then
  echo "queued again, to go on from the newest checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _slurm(config: LaunchConfig, taken: Taken) -> LaunchJob:
    own = {"job-name": config.name, "nodes": config.nodes, "ntasks-per-node": 1, "requeue": None}
    if config.gpus_per_node:
        own["gpus-per-node"] = config.gpus_per_node
    if twice := own.keys() & config.slurm.options.keys():
        raise UsageError(
            f"slurm.options: {min(twice)} is set by the launcher",
            where="slurm.options",
            fix="leave it out; name, nodes and gpus_per_node are fields of launch.yaml",
        )
    options = {"output": "%x-%j.log", "open-mode": "append", **own, **config.slurm.options}
    lines = ["#!/bin/bash"]
    for name, value in options.items():
        given = "" if value is None else f"={shlex.quote(str(value))}"
        lines.append(f"#SBATCH --{name}{given}")
    lines += ["set -u", f"margin={config.margin}", _SLURM + f"S={shlex.quote(taken.folder)}"]
    run = f'srun --wait="$margin" {shlex.quote(sys.executable)}'
    more = ("--node-from=SLURM_NODEID", '"${limit[@]}"')
    lines += [*_script(config, taken, run, '"$address:$port"', *more), _SLURM_END]
    return LaunchJob(name="slurm.sbatch", text="\n".join(lines), command=SBATCH)


def _policies(max_restarts: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod failure policy of the Job, and the failure policy of the JobSet.

    A pod that is disrupted, or ends with 75, fails its Job with a message that says so, and the
    JobSet is made again whatever was counted; a final code ends it. What nobody knows (the node is
    gone, the agent itself was killed) counts.
    """
    reason = {"onJobFailureReasons": ["PodFailurePolicy"]}
    again = [f"exit code {REQUEUE_EXIT_CODE} ", "condition DisruptionTarget "]
    disrupted: dict[str, Any] = {
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]
    }
    codes: Iterable[dict[str, Any]] = (
        {"onExitCodes": {"containerName": POD, "operator": "In", "values": values}}
        for values in ([REQUEUE_EXIT_CODE], sorted(FINAL))
    )
    on, ends = "RestartJobSetAndIgnoreMaxRestarts", "FailJobSet"
    rules = [
        {"name": "goesOn", "action": on, **reason, "onJobFailureMessagePatterns": again},
        {"name": "wouldFailAgain", "action": ends, **reason},
    ]
    pods: dict[str, Any] = {
        "rules": [{"action": "FailJob", **each} for each in (disrupted, *codes)]
    }
    return pods, {"maxRestarts": max_restarts, "rules": rules}


def _k8s(config: LaunchConfig, taken: Taken) -> LaunchJob:
    k8s = config.k8s
    if k8s is None:
        raise _without_image("k8s")
    if not any(taken.folder.startswith(place.rstrip("/") + "/") for place in k8s.claims.values()):
        raise UsageError(
            "no claim holds the snapshot",
            where="k8s.claims",
            why=f"pods could not read {taken.folder}",
            fix="mount the volume under the same path here and there, and set snapshots to it",
        )
    first = f"{config.name}-{POD}-0-0.{config.name}:{config.port}"
    node = "--node-from=JOB_COMPLETION_INDEX"
    script = [f"S={shlex.quote(taken.folder)}"]
    script += _script(config, taken, "exec python", first, node)
    limits = {**k8s.resources, **({k8s.gpu: config.gpus_per_node} if config.gpus_per_node else {})}
    mounts = [{"name": name, "mountPath": place} for name, place in k8s.claims.items()]
    volumes = [{"name": n, "persistentVolumeClaim": {"claimName": n}} for n in k8s.claims]
    container = {
        "name": POD,
        "image": k8s.image,
        "command": ["sh", "-c", "\n".join(script)],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": config.margin,
        "containers": [container],
        "volumes": [*volumes, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
        **k8s.pod,
    }
    pods, whole = _policies(k8s.max_restarts)
    labels = {"olm/snapshot": taken.digest}
    task = {
        "parallelism": config.nodes,
        "completions": config.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": pods,
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    spec = {
        "network": {"enableDNSHostnames": True},
        "failurePolicy": whole,
        "replicatedJobs": [{"name": POD, "replicas": 1, "template": {"spec": task}}],
    }
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    about = {"name": config.name, "namespace": k8s.namespace, "labels": labels}
    text = _yaml({**kind, "metadata": about, "spec": spec})
    return LaunchJob(name="k8s.yaml", text=text, command=("kubectl", "apply", "-f"))


def _skypilot(config: LaunchConfig, taken: Taken) -> LaunchJob:
    sky = config.skypilot
    first = f'"$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{config.port}"'
    lines = _script(config, taken, "exec python", first, "--node-from=SKYPILOT_NODE_RANK")
    recovery = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [REQUEUE_EXIT_CODE]}
    task = {
        "name": config.name,
        "num_nodes": config.nodes,
        "resources": {**sky.resources, "job_recovery": recovery},
        "file_mounts": {**sky.file_mounts, f"~/{REMOTE}": taken.folder},
        **({} if sky.setup is None else {"setup": sky.setup}),
        "run": "\n".join([f'S="$HOME/{REMOTE}"', *lines]),
    }
    command = ("sky", "jobs", "launch", "--yes")
    return LaunchJob(name="skypilot.yaml", text=_yaml(task), command=command)


def _dstack(config: LaunchConfig, taken: Taken) -> LaunchJob:
    dstack = config.dstack
    if dstack is None:
        raise _without_image("dstack")
    first = f'"$DSTACK_MASTER_NODE_IP:{config.port}"'
    more = ("--node-from=DSTACK_NODE_RANK", "--again")  # dstack itself knows no exit codes
    lines = _script(config, taken, "exec python", first, *more)
    hours = f"{dstack.retry_hours}h"
    task = {
        "type": "task",
        "name": config.name,
        "image": dstack.image,
        "nodes": config.nodes,
        "files": [f"{taken.folder}:/{REMOTE}"],
        "commands": ["\n".join([f"S=/{REMOTE}", *lines])],
        "resources": dstack.resources,
        "volumes": dstack.volumes,
        "stop_duration": f"{config.margin}s",
        "retry": {"on_events": ["no-capacity", "interruption"], "duration": hours},
    }
    return LaunchJob(
        name="dstack.yaml", text=_yaml(task), command=("dstack", "apply", "--yes", "-f")
    )


def _without_image(field: str) -> UsageError:
    return UsageError(
        f"{field} is missing in launch.yaml",
        where=field,
        why="its nodes have the packages of an image",
        fix=f"add `{field}: {{image: ...}}`",
    )


_MAKERS = {
    "local": _local,
    "slurm": _slurm,
    "k8s": _k8s,
    "skypilot": _skypilot,
    "dstack": _dstack,
}
SCHEDULERS = tuple(_MAKERS)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and what stands twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False)
