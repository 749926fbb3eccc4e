"""Wall time and peak memory of a command with all the processes it starts.

Memory is sampled from /proc over the command's whole process tree, for all commands alike: every
INTERVAL seconds, or less often where a sample takes long (22 ms for 1 GiB here), so that sampling
takes no more than a fiftieth of a CPU. `memory` is the largest sum of proportional anonymous and
shared memory: a page that forked processes share counts once, and files mapped from disk, which the
kernel can drop, do not count. `rss` is the largest sum of resident set sizes, as `ps` shows them. A
peak between two samples is missed. Never: measure a process that the command did not start.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

INTERVAL = 0.2
_FIELD = re.compile(rb"^(Rss|Pss_Anon|Pss_Shmem):\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Usage:
    """One run: wall seconds, exit code, peak bytes of the process tree, the end of its output."""

    seconds: float
    code: int
    memory: int
    rss: int
    tail: str


class TreeSampler(threading.Thread):
    """Samples the memory of all processes of one session, given by its leader's process id."""

    def __init__(self, session: int) -> None:
        super().__init__(daemon=True)
        self.memory = self.rss = 0
        self._session, self._done = session, threading.Event()
        self._inside: dict[str, bool] = {}

    def run(self) -> None:
        """Sample until `finish`."""
        pause = INTERVAL
        while not self._done.wait(pause):
            start = time.perf_counter()
            self.sample()
            pause = max(INTERVAL, 50 * (time.perf_counter() - start))

    def finish(self) -> None:
        """Stop sampling."""
        self._done.set()
        self.join()

    def sample(self) -> None:
        """Add up the tree once."""
        present = [name for name in os.listdir("/proc") if name.isdigit()]
        self._inside = {p: self._inside[p] for p in present if p in self._inside}
        memory = rss = 0
        for process in present:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if process not in self._inside:
                    stat = Path(f"/proc/{process}/stat").read_text()
                    # after the command's name, which may hold spaces: state, ppid, pgrp, session
                    session = int(stat.rpartition(")")[2].split()[3])
                    self._inside[process] = session == self._session
                if self._inside[process]:
                    fields = Path(f"/proc/{process}/smaps_rollup").read_bytes()
                    for name, kilobytes in _FIELD.findall(fields):
                        if name == b"Rss":
                            rss += int(kilobytes) << 10
                        else:
                            memory += int(kilobytes) << 10
        self.memory, self.rss = max(self.memory, memory), max(self.rss, rss)


def run(command: list[str], *, environment: dict[str, str], folder: Path, limit: float) -> Usage:
    """Run a command in a session of its own; its output goes to `folder`/log.

    Args:
        limit: seconds after which it is killed; its exit code is then negative.
    """
    log = folder / "log"
    with log.open("wb") as out:
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        sampler = TreeSampler(process.pid)
        sampler.start()
        timer = threading.Timer(limit, end_group, [process.pid])
        timer.start()
        try:
            code = process.wait()
            seconds = time.perf_counter() - start
        finally:
            timer.cancel()
            sampler.finish()
            end_group(process.pid)  # what the command left behind, and the command on Ctrl-C
            process.wait()
    tail = log.read_bytes()[-20_000:].decode("utf-8", "replace")
    return Usage(seconds, code, sampler.memory, sampler.rss, tail)


def end_group(leader: int) -> None:
    """Kill the process group of a command that `run` started, if any of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files under a folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
