"""Starts Slurm for real: a controller and two nodes, all of them on loopback, as root.

    with serve_slurm(folder) as cluster:      cluster.conf for SLURM_CONF

Nodes n1 and n2 have two CPUs each. Arrays may have no more than `MAX_ARRAY_SIZE` elements.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.polling import wait_until

MAX_ARRAY_SIZE = 6
NODES = ("n1", "n2")


def why_not() -> str | None:
    """Return why there can be no cluster here, or None."""
    for name in ("slurmctld", "slurmd", "munged", "sbatch"):
        if shutil.which(name, path=_path()) is None:
            return f"no {name} here: apt-get install --no-install-recommends slurm-wlm munge"
    return None if os.geteuid() == 0 else "Slurm's daemons are started as root"


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Attributes:
        folder: configuration, logs and state.
        conf: path of slurm.conf.
    """

    folder: Path
    conf: Path

    def run(self, *command: str) -> str:
        """Run one of Slurm's commands; return what it printed."""
        done = subprocess.run(
            command, env=self.environment(), capture_output=True, text=True, check=True
        )
        return done.stdout

    def environment(self) -> dict[str, str]:
        """Return this process's environment with the cluster's configuration."""
        return os.environ | {"SLURM_CONF": str(self.conf), "PATH": _path()}

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        subprocess.run(
            ["slurmd", "-f", str(self.conf), "-N", node], env=self.environment(), check=True
        )

    def live_nodes(self) -> list[str]:
        """Return the names of the nodes that are not down."""
        return [
            line.split()[0]
            for line in self.run("sinfo", "-hN", "-o", "%N %T").splitlines()
            if "down" not in line
        ]

    def kill_node(self, node: str) -> None:
        """Kill everything on a node, as a power cut does; the controller is told."""
        processes = _processes()
        doomed = {
            pid
            for pid, (_, words) in processes.items()
            if words[0].endswith("slurmd") and node in words and str(self.conf) in words
        }
        steps = {
            pid
            for pid, (_, words) in processes.items()
            if words[0].startswith("slurmstepd") and _node_of(pid) == node
        }
        doomed |= steps
        grown = True
        while grown:
            more = {pid for pid, (parent, _) in processes.items() if parent in doomed} - doomed
            grown = bool(more)
            doomed |= more
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def empty(self) -> None:
        """Cancel all jobs, bring back all nodes, and wait until they are idle."""
        self.run("scancel", "--me")
        self._revive()
        wait_until(lambda: not self.run("squeue", "-h"), "an empty queue")
        self.wait_idle()

    def _revive(self) -> None:
        """Start the daemons that are gone; tell the controller that a killed node is well again."""
        ours = [words for _, words in _processes().values() if str(self.conf) in words]
        for node in NODES:
            if not any(words[0].endswith("slurmd") and node in words for words in ours):
                self.start_node(node)
        for line in self.run("sinfo", "-hN", "-o", "%N %E").splitlines():
            if line.split()[1:] == ["killed"]:
                # refused while the daemon has not registered: asked again soon
                subprocess.run(
                    ["scontrol", "update", f"nodename={line.split()[0]}", "state=resume"],
                    env=self.environment(),
                    capture_output=True,
                )

    def wait_idle(self) -> None:
        """Wait until every node is ready for work."""

        def idle() -> bool:
            if self.run("sinfo", "-h", "-t", "idle", "-o", "%D").split() == [str(len(NODES))]:
                return True
            self._revive()
            return False

        try:
            wait_until(idle, "idle nodes")
        except TimeoutError as error:
            raise RuntimeError(f"{error}: {self.run('sinfo', '-N', '-l')}") from error


@contextlib.contextmanager
def serve_slurm(folder: Path) -> Iterator[Cluster]:
    """Yield a cluster that lives inside the block."""
    for name in ("state", "log", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    conf = folder / "slurm.conf"
    munge = _start_munge(folder)
    cluster = Cluster(folder, conf)
    try:
        conf.write_text(_configuration(folder))
        subprocess.run(["slurmctld", "-f", str(conf)], env=cluster.environment(), check=True)
        for node in NODES:
            cluster.start_node(node)
        cluster.wait_idle()
        yield cluster
    finally:
        for pid, (_, words) in _processes().items():
            if str(folder) in " ".join(words) and words[0].endswith(("slurmctld", "slurmd")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        munge.kill()
        munge.wait()


def _start_munge(folder: Path) -> subprocess.Popen[bytes]:
    """Start an authentication daemon of our own, with a key of our own."""
    key, place = folder / "munge.key", folder / "munge"
    place.mkdir(mode=0o755)
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    daemon = subprocess.Popen(
        [
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={place}/socket", f"--pid-file={place}/pid"),
            *(f"--log-file={place}/log", f"--seed-file={place}/seed"),
        ],
        env=os.environ | {"PATH": _path()},
        stderr=subprocess.DEVNULL,
    )

    def listening() -> bool:
        if daemon.poll() is not None:
            raise RuntimeError("munged did not start")
        return (place / "socket").exists()

    wait_until(listening, "munged")
    return daemon


def _configuration(folder: Path) -> str:
    host = socket.gethostname().split(".")[0]
    controller, first = _free_ports(2 + len(NODES))
    last = first + len(NODES) - 1
    return f"""\
ClusterName=olmtest
MessageTimeout=100
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={controller + 1}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
ReturnToService=2
MaxArraySize={MAX_ARRAY_SIZE}
JobRequeue=1
KillWait=60
InactiveLimit=0
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/none
NodeName=n[1-{len(NODES)}] NodeHostname={host} NodeAddr=127.0.0.1 \
Port=[{first}-{last}] CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _free_ports(count: int) -> tuple[int, int]:
    """Return a port for the controller and the first of `count` - 2 ports in a row."""
    for base in range(16_800, 30_000, 10):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(base, base + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return base, base + 2
    raise RuntimeError("no free ports on loopback")


def _processes() -> dict[int, tuple[int, list[str]]]:
    """Return parent and command line of every process."""
    found = {}
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
                parent = int((place / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if words[0]:
                    found[int(place.name)] = (parent, words)
    return found


def _node_of(pid: int) -> str | None:
    """Return the node a step daemon belongs to, by the folder it works in or its environment."""
    for child, (parent, _) in _processes().items():
        if parent == pid:
            with contextlib.suppress(OSError):
                for item in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                    if item.startswith(b"SLURMD_NODENAME="):
                        return item.split(b"=", 1)[1].decode()
    return None


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
