"""The reference page has a table for each section of the configuration, a text for each field.

That its lines are those of the dataclasses: tests/docs/test_generated_pages.py.
"""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

from olm_train.run.config import RunConfig


def test_each_section_has_its_table_and_each_field_its_text(repository: Path) -> None:
    page = (repository / "docs" / "reference" / "train-config.md").read_text()
    tables = set(re.findall(r"<!-- fields of (\w+) -->", page))
    hints = get_type_hints(RunConfig)
    assert tables == {"run", *(name for name, hint in hints.items() if is_dataclass(hint))}
    lines = re.findall(r"^\| `.*$", page, re.MULTILINE)
    assert len(lines) > 100
    assert not [line for line in lines if not line.rpartition(" | ")[2].strip(" |")]
