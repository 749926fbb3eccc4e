"""The configuration of a run as it is saved with it: so that it can be read after a move.

    RunConfig -> plain values, local paths relative to the run's folder -> config.json
              <- Values.read back, paths counted from that folder ------

A path that lies elsewhere only by default, such as a cache, is saved with `~`. URLs stay.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from olm_data.config.convert import as_dict
from olm_data.config.hints import FilePath
from olm_data.storage.store import is_remote
from olm_train.checkpoint.manifest import step_of


def saved_config(config: Any, run: str) -> dict[str, Any]:
    """Return a configuration as JSON values, its local paths relative to a local run's folder.

    Args:
        config: dataclass; fields of the type `FilePath` are paths.
        run: the run's folder; for a remote one local paths stay as they are.
    """
    saved: dict[str, Any] = as_dict(config)
    _shorten(config, saved, run)
    return saved


def folder_of_paths(config_file: Path) -> Path:
    """Return what the paths in the `config.json` of a run or of one of its checkpoints count from:
    the run's folder."""
    folder = config_file.absolute().parent
    return folder.parent if step_of(folder.name) is not None else folder


def _shorten(config: Any, saved: dict[str, Any], run: str) -> None:
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, kind = getattr(config, field.name), hints[field.name]
        if dataclasses.is_dataclass(value):
            _shorten(value, saved[field.name], run)
        elif FilePath in (kind, *get_args(kind)):
            if isinstance(value, Mapping):
                saved[field.name] = {key: relative_path(path, run) for key, path in value.items()}
            elif value is not None and value == field.default:
                saved[field.name] = _below_home(value)
            elif value is not None:
                saved[field.name] = relative_path(value, run)


def relative_path(path: str, run: str) -> str:
    """Return a local path as seen from a local run's folder; another one as it is."""
    return path if is_remote(path) or is_remote(run) else os.path.relpath(path, run)


def _below_home(path: str) -> str:
    home = os.path.expanduser("~")
    return f"~{path[len(home) :]}" if path.startswith(f"{home}/") else path
