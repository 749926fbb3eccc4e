"""Which process on which machine, told so that another process there can ask whether it lives.

    this_process() -> host, pid, start time, machine --written down, read by another--> state_of

A machine is a booted kernel and a namespace of process numbers in it: where both are the same, a
process number means the same process, and the monotonic clock is one clock.
"""

from __future__ import annotations

import hashlib
import os
import socket
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_STATE, _STARTED = 0, 19  # fields of /proc/PID/stat after the name, proc(5)


class ProcessState(StrEnum):
    """What is known of a process."""

    running = "running"
    stopped = "stopped"  # by SIGSTOP or a debugger: it may go on
    dead = "dead"
    elsewhere = "elsewhere"  # on another machine: nothing is known


class Process(NamedTuple):
    """A process as others may know it.

    Attributes:
        host: name of the machine, for people.
        machine: digest of what tells machines apart.
        pid: process number.
        started: clock ticks since the boot at which it began; 0 where the system does not tell.
    """

    host: str
    machine: str
    pid: int
    started: int


def this_process() -> Process:
    """Return this process."""
    pid = os.getpid()
    return Process(socket.gethostname(), machine(), pid, _stat(pid)[1])


def machine() -> str:
    """Return a digest of this boot of this kernel and its namespace of process numbers."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text()
        namespace = os.readlink(_PROC / "self/ns/pid")
    except OSError:  # no Linux
        boot, namespace = socket.gethostname(), ""
    return hashlib.sha256(f"{boot}\n{namespace}".encode()).hexdigest()[:16]


def state_of(process: Process) -> ProcessState:
    """Return what this machine knows of a process."""
    if process.machine != machine():
        return ProcessState.elsewhere
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return ProcessState.dead
    except PermissionError:  # another user's
        pass
    state, started = _stat(process.pid)
    if state in ("Z", "X") or (started and process.started and started != process.started):
        return ProcessState.dead
    return ProcessState.stopped if state in ("T", "t") else ProcessState.running


def _stat(pid: int) -> tuple[str, int]:
    """Return the state's letter and the start time of a process, or "" and 0 where unknown."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()
    return fields[_STATE], int(fields[_STARTED])


def batch_job() -> tuple[str, int]:
    """Return the Slurm job of this process, "" for none, and how often it was started again."""
    number, again = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
    if not number.isdecimal():
        return "", 0
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")[:64]
    return f"slurm {cluster} {number}", int(again) if again.isdecimal() else 0
