"""Packages that are installed for this process alone, by what lies in a folder of `sys.path`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, name: str, entry_points: Mapping[str, Mapping[str, str]]) -> None:
    """Install a package whose modules lie in `folder`; before the folder is on the path."""
    about = folder / f"{name}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    lines = []
    for group, names in entry_points.items():
        lines += [f"[{group}]", *(f"{each} = {path}" for each, path in names.items())]
    (about / "entry_points.txt").write_text("\n".join([*lines, ""]))


def install_block(text: str, folder: Path) -> str:
    """What a block that writes a module and its package would install; the module's name."""
    files = dict(re.findall(r"^cat > (\S+) <<'\w+'\n(.*?)^[A-Z]+$", text, re.MULTILINE | re.DOTALL))
    project = tomllib.loads(files.pop("pyproject.toml"))["project"]
    ((module, code),) = files.items()
    (folder / module).write_text(code)
    install(folder, project["name"], project["entry-points"])
    return module.removesuffix(".py")
