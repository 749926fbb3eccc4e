"""What `launch.yaml` says: the run, its nodes, and what each scheduler must be told.

launch.yaml --parse--> LaunchConfig --jobs.py--> files of a scheduler
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from olm_data.config.convert import Config
from olm_data.config.hints import FilePath, LocalPath, Needs, NonNegativeInt, PositiveInt

Name = Annotated[
    str,
    Meta(
        pattern="^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$",
        description="a letter, then at most 39 lower-case letters, digits or -",
    ),
]
Share = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class PreflightConfig(Config):
    """What each node must have before the first step.

    Attributes:
        enabled: look, and write `preflight.json`.
        disk_gb: 10^9 bytes free where the run has its logs.
        shm_gb: 10^9 bytes free in `/dev/shm`.
        open_files: files that a process may have open (`ulimit -n`).
        clock_seconds: how far the clock of a node may be from the median.
        slow_share: a node with less than this share of the median of the nodes is slow.
        refuse_slow: end where a node is slow; else a warning names it.
        megabytes: 10^6 bytes of a measured exchange.
    """

    enabled: bool = True
    disk_gb: Annotated[float, Meta(ge=0)] = 10.0
    shm_gb: Annotated[float, Meta(ge=0)] = 1.0
    open_files: NonNegativeInt = 4096
    clock_seconds: Annotated[float, Meta(gt=0)] = 5.0
    slow_share: Share = 0.5
    refuse_slow: bool = False
    megabytes: PositiveInt = 64


@dataclass(frozen=True, kw_only=True)
class SlurmConfig(Config):
    """For `--to slurm`.

    Attributes:
        options: of sbatch, as `time: 24:00:00`; null: one without a value.
    """

    options: dict[str, str | int | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class K8sConfig(Config):
    """For `--to k8s`: a JobSet.

    Attributes:
        image: container image with the packages of the run.
        namespace: where the job is made.
        claims: volume claims that all pods mount, each with its place; one holds the snapshots.
        resources: requests and limits of a pod beside its GPUs, as `rdma/ib: 8`.
        gpu: resource that is a GPU.
        pod: other fields of the pod's spec, such as `nodeSelector`.
        max_restarts: restarts where nobody knows why a pod ended.
    """

    image: str
    namespace: str = "default"
    claims: dict[str, str] = field(default_factory=dict)
    resources: dict[str, str | int] = field(default_factory=dict)
    gpu: str = "nvidia.com/gpu"
    pod: dict[str, Any] = field(default_factory=dict)
    max_restarts: NonNegativeInt = 3


@dataclass(frozen=True, kw_only=True)
class SkypilotConfig(Config):
    """For `--to skypilot`: a managed job.

    Attributes:
        resources: of SkyPilot, as `accelerators: H100:8`.
        setup: commands that install the packages of the run.
        file_mounts: of SkyPilot, beside the snapshot.
    """

    resources: dict[str, Any] = field(default_factory=dict)
    setup: str | None = None
    file_mounts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DstackConfig(Config):
    """For `--to dstack`: a task.

    Attributes:
        image: container image with the packages of the run.
        resources: of dstack, as `gpu: H100:8`.
        volumes: of dstack, as `my-volume:/data`.
        retry_hours: how long it is tried again where there is no capacity, or it was interrupted.
    """

    image: str
    resources: dict[str, Any] = field(default_factory=dict)
    volumes: list[str] = field(default_factory=list)
    retry_hours: PositiveInt = 24


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Config):
    """All of `launch.yaml`.

    Attributes:
        name: of the job.
        train: configuration of the run.
        options: options of the run, as `--parallel=auto`.
        nodes: machines.
        gpus_per_node: GPUs of each, a rank each; 0: ranks on CPUs.
        ranks_per_node: ranks of each without GPUs.
        snapshots: folder of the snapshots, which all nodes see; default: `snapshots` beside
            `launch.yaml`.
        untracked: files that git does not track, and the run needs, beside or below `launch.yaml`.
        environment: variables of the run.
        margin: seconds that ranks have to save in: before Slurm's time limit, and once the job is
            asked to stop.
        port: at which the nodes meet at the first one; Slurm's jobs have their own.
        preflight: what is looked at before the first step.
        slurm, k8s, skypilot, dstack: what that scheduler must be told.
    """

    name: Name
    train: FilePath
    options: list[str] = field(default_factory=list)
    nodes: PositiveInt = 1
    gpus_per_node: NonNegativeInt = 0
    ranks_per_node: Annotated[PositiveInt, Needs("gpus_per_node", value=0)] = 1
    snapshots: LocalPath | None = None
    untracked: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    margin: PositiveInt = 300
    port: Annotated[int, Meta(ge=1, le=65535)] = 29500
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    k8s: K8sConfig | None = None
    skypilot: SkypilotConfig = field(default_factory=SkypilotConfig)
    dstack: DstackConfig | None = None

    @property
    def ranks(self) -> int:
        """Ranks of a node."""
        return self.gpus_per_node or self.ranks_per_node
