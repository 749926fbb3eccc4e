"""Runs the blocks of a page as a reader would: one after the other, in one shell, in one folder.

    page, folder, environment -> one bash script -> what each block printed

Shell variables and files live on from block to block. Python blocks are scripts of their own. What
a page runs in Python is forked (`support.forked`).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from support.forked import commands
from support.pages import REPOSITORY, Block, Page
from support.ports import free_port

BORDER = f"<{uuid4().hex}>"
"""Printed before each block; what a page prints holds none, not even a random model's text."""


@dataclass(frozen=True)
class PageRun:
    """What a run of a page left.

    Attributes:
        folder: where it ran.
        said: what each block printed, both streams together, by block.
    """

    folder: Path
    said: Mapping[Block, str]

    @property
    def all_said(self) -> str:
        """What all blocks printed."""
        return "".join(self.said.values())


def run_page(page: Page, folder: Path, extra: Mapping[str, str], timeout: float = 900) -> PageRun:
    """Run a page's blocks in `folder`.

    Args:
        page: its blocks that can run are run.
        folder: there, with what the page says is given in it.
        extra: more variables of the environment.
        timeout: seconds for all of it.

    Raises:
        AssertionError: a block failed; the message names it and what it printed.
    """
    blocks = [block for block in page.blocks if block.runs]
    script = "".join(_step(number, block, folder) for number, block in enumerate(blocks))
    environment = os.environ | dict(extra)
    environment |= {
        "PATH": f"{commands()}:{environment['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "PET_MASTER_PORT": str(free_port()),  # torchrun's, as pages may run side by side
    }
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )
    parts = ran.stdout.split(BORDER)[1:]
    assert ran.returncode == 0, f"{blocks[len(parts) - 1]} failed:\n{parts[-1][-4000:]}"
    return PageRun(folder, dict(zip(blocks, parts, strict=True)))


def _step(number: int, block: Block, folder: Path) -> str:
    if block.language != "python":
        return f"printf '{BORDER}'\n{block.text}\n"
    script = folder / f"block{number}.py"
    script.write_text(block.text)
    return f"printf '{BORDER}'\npython {script.name}\n"
