"""What every comparison with other projects does alike.

    Tool -> ready: Python of its own environment, version    | NotInstalled, with the reason
    Task -> task.json -> `python -m peers.<kind>.<name> task.json` with `surroundings`

This file is imported in the tools' environments too, so it needs the standard library only. Never:
measure anything, or know a particular tool.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from peers.environments import NotInstalled, default_root, python_of, version_of

BENCHMARKS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A project to measure.

    Attributes:
        name: what it is called on the command line and in the table.
        package: the package whose version is printed.
        environment: name of its virtual environment, by default its own; tools of one package
            may share one.
        installs: pip commands' arguments, in order; empty: runs in this environment.
    """

    name: str
    package: str
    environment: str = ""
    installs: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "environment", self.environment or self.name)


@dataclass(frozen=True, kw_only=True)
class SavedTask:
    """What a tool's program is told, as the JSON of its fields."""

    def save(self, path: Path) -> None:
        """Write the task."""
        path.write_text(json.dumps(asdict(self)))


T = TypeVar("T", bound=SavedTask)
K = TypeVar("K", bound=Tool)


def task_of_command_line(kind: type[T]) -> T:
    """Return the task whose path is the first argument of this program."""
    return kind(**json.loads(Path(sys.argv[1]).read_text()))


def add_options(
    parser: argparse.ArgumentParser, flag: str, tools: Iterable[Tool], limit: float
) -> argparse._ArgumentGroup:
    """Add the options of --peers that all comparisons have; return their group.

    Args:
        flag: the option that chooses tools by name.
        limit: default of --limit, the most seconds a tool may take for one answer.
    """
    names = ",".join(tool.name for tool in tools)
    group = parser.add_argument_group("with --peers")
    group.add_argument("--peers", action="store_true", help="compare with other projects")
    group.add_argument(flag, default=names, help=f"of {names}")
    group.add_argument("--peer-envs", type=Path, default=default_root())
    group.add_argument("--limit", type=float, default=limit, help="most seconds for one answer")
    return group


def choose(text: str, known: Iterable[str], what: str) -> list[str]:
    """Split an option at commas; names that are not known end the program."""
    known = list(known)
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise SystemExit(f"error: {what} takes {','.join(known)}; not {','.join(unknown) or text}")
    return names


def chosen(text: str, tools: Iterable[K], flag: str) -> list[K]:
    """Return the tools that an option names, in the order of the table."""
    tools = list(tools)
    names = choose(text, [tool.name for tool in tools], flag)
    return [tool for tool in tools if tool.name in names]


def ready(tool: Tool, root: Path) -> tuple[Path, str] | NotInstalled:
    """Return a tool's Python and version, or why it has none."""
    try:
        python = python_of(tool, root)
        return python, version_of(tool, python)
    except NotInstalled as error:
        return error


def surroundings(tool: Tool, scratch: Path) -> dict[str, str]:
    """Return a tool's environment: ours, offline, with all caches in its temporary folder."""
    paths = [BENCHMARKS] if tool.installs else [BENCHMARKS, BENCHMARKS.parent]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TMPDIR": str(scratch),
        "HF_HOME": str(scratch / "huggingface"),
        "HF_HUB_OFFLINE": "1",
    }
