"""Finds the code blocks of a documentation page, so that tests can run what readers will type."""

from __future__ import annotations

import re
from pathlib import Path


def code_blocks(page: Path, language: str) -> list[str]:
    """Return the fenced code blocks of `page` marked with `language`, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
