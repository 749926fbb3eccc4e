"""Finds every place in Python source that could turn bytes of a file into running code.

    source -> names, as imported -> references to unpicklers, unsafe loaders, eval, imports by name

Works on the syntax tree: strings and comments do not count, aliases do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

UNPICKLERS = (
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "_pickle", "cPickle", "pickle._Unpickler"),
    *("dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle", "pandas.read_pickle"),
    *("multiprocessing.reduction", "pyarrow.deserialize", "pickletools.optimize"),
    *("torch.load", "torch.jit.load", "torch.hub", "torch.package", "torch.export.load"),
    *("torch.serialization", "torch.distributed.checkpoint.load", "torch.storage._load_from_bytes"),
    *(
        f"torch.distributed.checkpoint.{name}"
        for name in (
            *("FileSystemReader", "filesystem", "format_utils", "load_state_dict", "state_dict"),
            *("hf_storage", "HuggingFaceStorageReader", "_fsspec_filesystem", "async_save"),
        )
    ),
    *("torch.distributed.all_gather_object", "torch.distributed.broadcast_object_list"),
    *("torch.distributed.gather_object", "torch.distributed.scatter_object_list"),
    *("torch.distributed.recv_object_list",),
)
LOADERS = (
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader"),
    *("yaml.UnsafeLoader", "yaml.FullLoader", "yaml.unsafe_load_all", "yaml.full_load_all"),
    *("numpy.load", "numpy.lib.format.read_array"),
)
BUILTINS = ("eval", "exec", "compile", "__import__")
RUNNERS = (
    *BUILTINS,
    *("importlib.import_module", "importlib.metadata.entry_points", "runpy"),
    *(f"importlib.util.{name}" for name in ("module_from_spec", "spec_from_file_location")),
    *("importlib.machinery", "importlib.util.spec_from_loader", "ctypes.CDLL"),
)
_KNOWN = UNPICKLERS + LOADERS + RUNNERS
_WORDS = re.compile(r"\b(?:" + "|".join({name.rpartition(".")[2] for name in _KNOWN}) + r")\b")
"""Every reference, under whatever alias, has the last part of its name somewhere in the file."""


def references(source: str) -> Iterator[str]:
    """Yield the full dotted name of each reference in a module to something of the lists above."""
    nodes = list(ast.walk(ast.parse(source)))
    aliases: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                aliases[name.asname or name.name.partition(".")[0]] = (
                    name.name if name.asname else name.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
    safe = {id(n.func) for n in nodes if isinstance(n, ast.Call) and _refuses_objects(n)}
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in inner:
            name = _dotted(node, aliases)
            if id(node) in safe and name in ("numpy.load", "numpy.lib.format.read_array"):
                continue
            if name and any(_within(name, known) for known in _KNOWN):
                yield name


def sites(folders: list[Path]) -> dict[str, set[str]]:
    """Return what the Python files below folders refer to, by path from the folder's parent."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            source = path.read_text()
            names = set(references(source)) if _WORDS.search(source) else set()
            if names:
                found[path.relative_to(folder.parent).as_posix()] = names
    return found


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    if isinstance(node, ast.Attribute):
        left = _dotted(node.value, aliases)
        return left and f"{left}.{node.attr}"
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id if node.id in BUILTINS else None)
    return None


def _within(name: str, known: str) -> bool:
    return name == known or name.startswith(f"{known}.")


def _refuses_objects(call: ast.Call) -> bool:
    return any(
        word.arg == "allow_pickle"
        and isinstance(word.value, ast.Constant)
        and word.value.value is False
        for word in call.keywords
    )
