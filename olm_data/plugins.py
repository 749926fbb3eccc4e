"""What can be added by name: entry points of this distribution, and of any other installed one.

    pyproject.toml  [project.entry-points."olm_train.callbacks"]
                    wandb = "olm_train.extensions.tracking.wandb:WandBCallback"
    names(group) -> ["wandb", ...]        path_of(group, "wandb") -> "module:Class"
    load(group, "wandb") -> the class; nothing is imported before

Our own parts come in by the same groups as those of others. The core imports no extension.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from olm_data.errors import UsageError
from olm_data.extras import DISTRIBUTION

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints


@cache
def ours(group: str) -> dict[str, str]:
    """Return the import paths, `module:name`, that this distribution gives in a group, by name."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution(DISTRIBUTION).entry_points.select(group=group)
    except PackageNotFoundError:  # a checkout that was never installed
        return {}
    return {entry.name: entry.value for entry in sorted(found)}


def names(group: str) -> list[str]:
    """Return the names that packages give in a group, ours first."""
    return list(dict.fromkeys([*ours(group), *sorted(_installed(group).names)]))


def path_of(group: str, name: str) -> str | None:
    """Return the import path that a package gives as `name` in `group`; None: none does."""
    if name in ours(group):
        return ours(group)[name]
    return next((e.value for e in _installed(group) if e.name == name), None)


def _installed(group: str) -> EntryPoints:
    return _found(group, tuple(sys.path))


@cache
def _found(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Return the entry points of all packages; their files are read once for each `sys.path`."""
    from importlib.metadata import entry_points  # it takes a tenth of a start

    return entry_points(group=group)


def load(group: str, name: str) -> Any:
    """Import what has a name in a group.

    Raises:
        UsageError: no installed package gives it.
        ImportError: its module, or what that needs, cannot be imported.
    """
    path = path_of(group, name)
    if path is None:
        raise UsageError(
            f"no installed package brings {name!r}",
            why=f"it is an extension, an entry point of {group}",
            fix=f"install the whole of {DISTRIBUTION} again",
        )
    return _imported(path)


def _imported(path: str) -> Any:
    module, _, attribute = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in filter(None, attribute.split(".")):
        found = getattr(found, part)
    return found


class Registry(Mapping[str, Any]):
    """What has a name in a group, by name, imported when it is looked up.

    Args:
        group: of entry points.
        first: the name that comes before the others: the default.
    """

    def __init__(self, group: str, first: str) -> None:
        self._group, self._first = group, first

    def __getitem__(self, name: str) -> Any:
        path = path_of(self._group, name)
        if path is None:
            raise KeyError(name)
        return _imported(path)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([self._first, *names(self._group)]))

    def __len__(self) -> int:
        return len(list(iter(self)))
