"""tests/support/README.md names every helper, and nothing that is gone."""

from __future__ import annotations

import re
from importlib.metadata import packages_distributions
from pathlib import Path

SUPPORT = Path(__file__).parent / "support"


def test_the_readme_names_every_helper_once() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (SUPPORT / "README.md").read_text(), re.M)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    there = [path.name for path in SUPPORT.glob("*.py") if path.name != "__init__.py"]
    folders = [f"{path.name}/" for path in SUPPORT.iterdir() if path.is_dir()]
    assert sorted(named) == sorted(there + [f for f in folders if f != "__pycache__/"])


def test_no_helper_has_the_name_of_an_installed_package() -> None:
    """Programs that are started in this folder would import it in the package's place."""
    helpers = {path.stem for path in SUPPORT.glob("*.py")} - {"__init__"}
    assert not helpers & set(packages_distributions())
