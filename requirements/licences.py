"""Writes LICENCES.md: what each package that users can install with us says of its licence.

    python requirements/licences.py

pyproject.toml (dependencies and extras but dev) -> metadata of what is installed -> a table
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDE = 60
"""A longer text is the licence itself, whose first line is its name."""


def licence(name: str) -> str:
    """Return the licence of an installed package, as it states it."""
    try:
        known = metadata(name)
    except PackageNotFoundError:
        return "not installed where this was made"
    if stated := known.get("License-Expression"):
        return str(stated)
    kinds = [
        kind.split(" :: ")[-1] for kind in known.get_all("Classifier") or [] if "License" in kind
    ]
    text = str(known.get("License") or "").strip().splitlines()
    return ", ".join(kinds) or (text[0][:WIDE] if text else "not stated")


def main() -> None:
    """Write the file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {k: v for k, v in project["optional-dependencies"].items() if k != "dev"}
    asked: dict[str, list[str]] = {}
    for extra, wanted in {"": project["dependencies"], **extras}.items():
        for one in wanted:
            name = re.match(r"[\w.-]+", one)
            assert name is not None
            asked.setdefault(name[0].lower(), []).append(f"`{extra}`" if extra else "always")
    rows = [f"| {name} | {', '.join(asked[name])} | {licence(name)} |" for name in sorted(asked)]
    table = "\n".join(
        ["| package | comes with | licence, as stated |", "| --- | --- | --- |", *rows]
    )
    head = (
        "# Licences of dependencies\n\nMade by `python requirements/licences.py`; do not edit.\n\n"
    )
    (Path(__file__).parent / "LICENCES.md").write_text(f"{head}{table}\n")


if __name__ == "__main__":
    main()
