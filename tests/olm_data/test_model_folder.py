"""The configuration of a folder in our own format: what it names, and what is none."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from olm_data.errors import ValidationError
from olm_data.model_folder import CONFIG, ExportedFile, FolderConfig, read_about
from olm_data.storage.store import Store

WEIGHTS = ExportedFile(file="model.safetensors", bytes=3, sha256="a" * 64)
ABOUT = FolderConfig(model={"d_model": 8}, parameters=7, weights=WEIGHTS)


def put(folder: Path, **changes: object) -> Store:
    about = {**msgspec.to_builtins(ABOUT), **changes}
    (folder / CONFIG).write_text(json.dumps(about))
    return Store(str(folder))


def test_it_names_all_files_but_itself(tmp_path: Path) -> None:
    about = read_about(put(tmp_path))
    assert (about, about.files) == (ABOUT, (WEIGHTS,))


@pytest.mark.parametrize("changes", [{"format": "hf"}, {"version": 9}, {"weights": None}])
def test_anything_else_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        read_about(put(tmp_path, **changes))
