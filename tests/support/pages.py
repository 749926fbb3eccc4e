"""Reads documentation pages: their blocks, what a reader is told to expect, and what a page needs.

    page.md -> Page(given=("books", "slurm"), blocks=[Block, ...])

Conventions of a page, visible in its source and invisible when it is rendered:

* `<!-- given: books, slurm -->` anywhere: what the reader has before the first block, by names of
  `tests/docs/conftest.py`. Without it the page begins in an empty folder.
* `<!-- not run: REASON -->` in the line above a block: it cannot run here. Its commands are parsed.
* A block marked `text` after a shell or Python block shows what that block prints: each line must
  be printed, in this order; `...` stands for any text in a line, and alone for any lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent

REPOSITORY = Path(__file__).resolve().parents[2]
SHELL = ("bash", "sh", "console")
RUN = (*SHELL, "python")

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- not run: (.+?) -->\n\Z")
GIVEN = re.compile(r"^<!-- given: (.+?) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: path of the page, relative to the repository.
        line: of its first line of content, from 1.
        language: as marked; "" where it is not.
        text: its content; of `console` only the commands.
        not_run: why it cannot run here; None: it can.
        prints: lines of which each must be printed, in order; `...` is any text.
    """

    page: str
    line: int
    language: str
    text: str
    not_run: str | None
    prints: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether a reader runs it and the tests do."""
        return self.language in RUN and self.not_run is None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Page:
    """A page: its path relative to the repository, what it needs, and its blocks in order."""

    name: str
    given: tuple[str, ...]
    blocks: tuple[Block, ...]

    @property
    def path(self) -> Path:
        """Where it lies."""
        return REPOSITORY / self.name


@cache
def pages() -> tuple[Page, ...]:
    """README.md and every page below docs, by name."""
    paths = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    return tuple(read_page(path.relative_to(REPOSITORY).as_posix(), path) for path in paths)


def read_page(name: str, path: Path) -> Page:
    """Return the page at `path` under the name `name`."""
    text = path.read_text()
    given = [word.strip() for found in GIVEN.findall(text) for word in found.split(",")]
    blocks: list[Block] = []
    for fence in FENCE.finditer(text):
        _, language, content = fence.groups()
        content = dedent(content)
        if language == "text" and blocks and blocks[-1].language in RUN:
            lines = [line.strip() for line in content.splitlines() if line.strip()]
            blocks[-1] = _with(blocks[-1], prints=(*blocks[-1].prints, *lines))
            continue
        mark = MARK.search(text[: fence.start()])
        line = text.count("\n", 0, fence.start()) + 2
        block = Block(name, line, language, content, mark and mark[1])
        blocks.append(_console(block) if language == "console" else block)
    return Page(name, tuple(given), tuple(blocks))


def printed(block: Block, said: str) -> str | None:
    """Return the first line of `block.prints` that `said` does not hold in its place, or None."""
    place = 0
    for line in block.prints:
        if line == "...":
            continue
        wanted = ".*".join(re.escape(part.strip()) for part in line.split("..."))
        found = re.compile(wanted).search(said, place)
        if found is None:
            return line
        place = found.end()
    return None


def _console(block: Block) -> Block:
    lines = block.text.splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    shown = tuple(line.strip() for line in lines if line.strip() and not line.startswith("$ "))
    return _with(block, text="\n".join(commands) + "\n", prints=shown)


def _with(block: Block, **changes: object) -> Block:
    return Block(**{**vars(block), **changes})  # type: ignore[arg-type]
