"""What is said where there is no train.yaml: the least one that trains on the lock that is here.

    nothing typed -> ./train.yaml | an error with the text to write into it
    NAME typed    -> NAME         | the name that is probably meant | the same text

Never: writes it.
"""

from __future__ import annotations

import os
from pathlib import Path

from olm_data.errors import OlmError, UsageError, printable
from olm_data.kinds import kind_of, nearest

NAME = "train.yaml"
MICROBATCH = 4096
"""Tokens, about: whole rows of the lock."""
MICROBATCHES = 4


def config_file(given: str | None) -> str:
    """Return the file with the configuration: the one given, or ./train.yaml.

    Raises:
        UsageError: there is none.
    """
    name = given or NAME
    if os.path.lexists(name):
        return name
    meant = nearest(name, "")
    raise UsageError(
        f"there is no configuration {printable(name)}"
        if given
        else f"no configuration file given, and there is no {NAME} here",
        where=os.path.abspath(name),
        why=None if meant else _recipes(),
        fix=meant or f"write it into {printable(name)}; this is enough:\n{_least()}",
    )


def _recipes() -> str | None:
    """Return the configurations that a clone of the repository has; an installed package, none."""
    found = sorted((Path(__file__).resolve().parents[2] / "pipelines").glob("*/train.yaml"))
    names = ", ".join(printable(min(os.path.relpath(path), str(path), key=len)) for path in found)
    return f"longer ones to read: {names}" if names else None


def _least() -> str:
    lock, length = _lock_here()
    size = length * max(1, MICROBATCH // length)
    lines = (
        "model: {preset: olm-4m}",
        f"data_loader: {{mixture: {lock}, global_batch_size: {size * MICROBATCHES}}}",
        f"train_module: {{rank_microbatch_size: {size}}}",
        "trainer: {save_folder: runs/first}",
    )
    return "\n".join(f"    {line}" for line in lines)


def _lock_here() -> tuple[str, int]:
    """Return the newest lock of this folder, as YAML has it, and tokens of a row of it."""
    from olm_data.mixture.lock import Lock

    there = [path for path in Path().glob("*.lock.json") if kind_of(str(path)) == "lock"]
    for path in sorted(there, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            return _quoted(path.name), Lock.read(path).sequence_length
        except OlmError:
            continue
    return "mixture.lock.json", 1


def _quoted(name: str) -> str:
    """Return a name as a scalar in a mapping on one line of YAML."""
    plain = name.replace("-", "").replace("_", "").replace(".", "").isalnum() and name[0].isalpha()
    return name if plain else "'" + name.replace("'", "''") + "'"
