"""A virtual environment for each peer, made once from the package registry and kept.

    <root>/<name>/            the environment
    <root>/<name>.json        what was installed into it; written last, so a half-made one is redone
    <root>/<name>.log         pip's output

Never: install anything into the environment that runs the benchmark.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Protocol

INSTALL_SECONDS = 1800


class Installed(Protocol):
    """What has an environment: its name, pip's arguments in order (empty: this environment), and
    the package whose version counts."""

    @property
    def environment(self) -> str: ...

    @property
    def installs(self) -> tuple[tuple[str, ...], ...]: ...

    @property
    def package(self) -> str: ...


class NotInstalled(Exception):
    """A peer's environment cannot be made; the text says why."""


def default_root() -> Path:
    """Return the folder that holds the environments unless --peer-envs says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "olm-peers"


def python_of(peer: Installed, root: Path) -> Path:
    """Return the Python that runs a peer, made and filled on first use.

    Raises:
        NotInstalled: venv or pip failed, or took longer than INSTALL_SECONDS.
    """
    if not peer.installs:
        return Path(sys.executable)
    root.mkdir(parents=True, exist_ok=True)
    home, stamp = root / peer.environment, root / f"{peer.environment}.json"
    python = home / "bin" / "python"
    wanted = json.dumps([sys.version.split()[0], peer.installs])
    if not stamp.exists() or stamp.read_text() != wanted or not python.exists():
        print(f"installing {peer.environment} into {home}", file=sys.stderr, flush=True)
        stamp.unlink(missing_ok=True)
        shutil.rmtree(home, ignore_errors=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        with (root / f"{peer.environment}.log").open("w+") as log:
            for command in (
                [sys.executable, "-m", "venv", str(home)],
                [*pip, "--upgrade", "pip"],
                *([*pip, *packages] for packages in peer.installs),
            ):
                try:
                    subprocess.run(
                        command, check=True, stdout=log, stderr=log, timeout=INSTALL_SECONDS
                    )
                except subprocess.TimeoutExpired as error:
                    why = f"no end after {INSTALL_SECONDS} s: {' '.join(command[-3:])}"
                    raise NotInstalled(why) from error
                except subprocess.CalledProcessError as error:
                    log.seek(0)
                    raise NotInstalled(last_line(log.read())) from error
        stamp.write_text(wanted)
    return python


def version_of(peer: Installed, python: Path) -> str:
    """Return the version of the peer's package in its environment.

    Raises:
        NotInstalled: the package is not there.
    """
    if not peer.installs:
        try:
            return metadata.version(peer.package)
        except metadata.PackageNotFoundError as error:
            raise NotInstalled(f"{peer.package} is not in this environment") from error
    code = f"from importlib.metadata import version; print(version({peer.package!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotInstalled(last_line(done.stderr))
    return done.stdout.strip()


def last_line(text: str) -> str:
    """Return the line of a program's output that says most: the last with "error", or the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or ["no output"])[-1][:300]
