"""The process that worker processes are forked from: started early, with the modules loaded.

    command line -> start(modules) -> fork server: one thread, imports while the parent goes on
                                        fork -> worker, worker, ... (no import left to do)

Only the standard library is imported here, so that the server can start before anything else is
loaded. A command that works on local files alone needs no server: `ONE_THREAD` is set before it
imports, and its workers are forked from itself.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

SOCKETS = "olm-sockets-"
MOST_TEMPORARY = 40
"""Bytes of TMPDIR with which a path fits: `/olm-sockets-HOST-PID-XXXXXXXX/listener-XXXXXXXX`
follow; a socket has 108."""

# A forked process starts a server of its own: it cannot wait for its parent's, as CPython tries to.
os.register_at_fork(after_in_child=forkserver._forkserver.__init__)  # type: ignore[misc]

SHORT = ("/tmp", "/var/tmp", "/dev/shm")  # a folder of a random name is made in it

ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy's library starts its threads when it is imported
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # of an allocator inside pyarrow
}
"""The libraries' own switches, for whatever is forked: parallelism is the runner's."""


def start(modules: Sequence[str]) -> None:
    """Start the fork server of this process, unless it runs; return while it imports `modules`.

    A module that is not installed is left out.
    """
    own_sockets()
    # "__main__" is what the server loads unless told otherwise; each worker would load it again
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["__main__", "olm_data.runners.server_end", *modules]
    )
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def one_thread() -> bool:
    """Whether this process has one thread, those of libraries included: only then may it fork."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:  # not Linux
        return False


def take_environment(values: Mapping[str, str]) -> None:
    """In a worker: let the environment be what the parent's is now, but for `ONE_THREAD`.

    The server's own is that of the time when it started: credentials set since would be missing.
    """
    for name in os.environ.keys() - values.keys() - ONE_THREAD.keys():
        del os.environ[name]
    os.environ.update({n: value for n, value in values.items() if n not in ONE_THREAD})


def own_sockets() -> None:
    """Give the sockets of this process and its workers a folder that `doctor --clean` knows.

    A socket's path has at most 108 bytes. Where those of TMPDIR would be longer, the folder is made
    in the first of the system's own temporary folders; all other files stay below TMPDIR.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir"):
        return
    for place in places():
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-", dir=place)
            Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
            config["tempdir"] = folder  # as `multiprocessing` itself notes its own
            return


def places() -> list[str]:
    """Return the folders that sockets may be in."""
    own = tempfile.gettempdir()
    return [own, *SHORT] if len(os.fsencode(own)) <= MOST_TEMPORARY else list(SHORT)


def _prefix() -> str:
    """Return how names of this machine's folders begin: of another container no process is seen."""
    return SOCKETS + re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:12] + "-"


def abandoned_sockets() -> list[Path]:
    """Return this user's folders of sockets on this machine whose processes are gone."""
    found, prefix = [], _prefix()
    for place in dict.fromkeys(places()):
        for folder in sorted(Path(place).glob(f"{prefix}*")):
            with suppress(OSError, ValueError):
                if not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                    process = int(folder.name.removeprefix(prefix).partition("-")[0])
                    if not Path(f"/proc/{process}").exists() and Path("/proc/self").exists():
                        found.append(folder)
    return found
