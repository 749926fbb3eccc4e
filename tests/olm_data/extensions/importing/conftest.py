"""The files of other projects, for a test to spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.importing import FOREIGN


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A copy of the files, for a test to spoil."""
    return Path(shutil.copytree(FOREIGN, tmp_path / "foreign"))
