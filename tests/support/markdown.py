"""Finds the code blocks of a documentation page, so that tests can run what readers will type."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def code_blocks(page: Path, language: str) -> list[str]:
    """Return the fenced code blocks of `page` marked with `language`, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def run_blocks(page: Path, folder: Path) -> str:
    """Run the page's bash blocks in `folder`, this checkout as olm-data; return what they print."""
    command = f'olm-data() {{ "{sys.executable}" -m olm_data.cli "$@"; }}\n'
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command + "".join(code_blocks(page, "bash"))],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
    return run.stdout
