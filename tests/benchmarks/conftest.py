"""The programs and modules of benchmarks/, imported as they import each other."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def imported(repository: Path) -> Iterator[Callable[[str], Any]]:
    """Importer of the modules under benchmarks/."""
    sys.path.insert(0, str(repository / "benchmarks"))
    yield importlib.import_module
    sys.path.remove(str(repository / "benchmarks"))
