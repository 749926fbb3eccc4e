"""Classes by their import path: `my_lab.parts:SpikyLoss`, or by the entry point of a package.

    name --is_import_path, entry_points--> module --import--> class, of the kind that is asked for

An import runs code. So it happens for a name that the user wrote, never for one that came with a
file of somebody else's; whoever calls this has made sure of that.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from olm_data.errors import UsageError, printable, suggest

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def import_path(kind: type) -> str:
    """Return the path by which a class is imported, `module:Class`.

    A class of a script has that of the module which `python -m` ran, if it was one.
    """
    module = kind.__module__
    if module == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = getattr(spec, "name", None) or module
    return f"{module}:{kind.__qualname__}"


def is_import_path(name: object) -> bool:
    """Whether a name is written as an import path."""
    return isinstance(name, str) and ":" in name


def load_class(
    path: str, base: type, *others: type, where: str, never_from: str | None = None
) -> type[Any]:
    """Import a class.

    Args:
        path: `module:Class`.
        base, others: one of these it has to be a subclass of.
        where: the place of the name, for messages.
        never_from: a folder that no module is taken from, though it were on the import path.

    Raises:
        UsageError: there is no such class, or it is of another kind.
    """
    found = load_object(path, "class", where=where, never_from=never_from)
    if not (isinstance(found, type) and issubclass(found, (base, *others))):
        raise UsageError(
            f"{path} is not a subclass of {base.__name__}",
            where=where,
            fix=f"derive it from {base.__module__}.{base.__qualname__}",
        )
    return found


def load_object(path: str, what: str, *, where: str, never_from: str | None = None) -> Any:
    """Import what a path names, see `load_class`.

    Args:
        what: it should be, for messages: a class, a function.
    """
    if not _PATH.fullmatch(path):
        raise UsageError(
            f"{printable(path)[:80]} is no import path",
            where=where,
            fix="write module:Class, such as my_lab.parts:SpikyLoss",
        )
    name, _, attribute = path.partition(":")
    if never_from is not None:
        _refuse_folder(name, never_from, where)
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"there is no module {error.name}",
            where=where,
            why=None if error.name == name else f"{name} needs it",
            fix="install the package that has it (pip install -e .), or put its folder on "
            "PYTHONPATH",
        ) from error
    except Exception as error:
        raise UsageError(
            f"{name} cannot be imported: {type(error).__name__}: {printable(str(error))[:200]}",
            where=where,
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [key for key, value in vars(found).items() if callable(value)]
            raise UsageError(
                f"{name} has no {what} {attribute}", where=where, fix=suggest(part, known)
            )
        found = getattr(found, part)
    return found


def _refuse_folder(module: str, folder: str, where: str) -> None:
    """Refuse a module that the import system would find below `folder`."""
    top = module.partition(".")[0]
    spec = None if top in sys.modules else importlib.util.find_spec(top)
    loaded = getattr(sys.modules.get(top), "__file__", None)
    places = [loaded, spec.origin if spec else None]
    places += (spec.submodule_search_locations or []) if spec else []
    inside = Path(folder).resolve()
    if any(place and Path(place).resolve().is_relative_to(inside) for place in places):
        raise UsageError(
            f"the module {top} lies in the folder of the model",
            where=where,
            why="code that comes with a model is never run",
            fix="install its package, if you trust it",
        )
