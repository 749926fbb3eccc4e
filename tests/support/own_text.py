"""A source and encoders of one's own, as a user has them: imported by `support.own_text:...`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olm_data.encoders.own import OwnEncoder
from olm_data.sources.own import OwnSource, Row


@dataclass(frozen=True, kw_only=True)
class Chapters(OwnSource):
    """Each file `*.book` below `root` is a part, and each line of it that has words a record."""

    root: str
    subset: str = "*"

    def parts(self) -> Iterable[str]:
        return sorted(path.name for path in Path(self.root).glob(f"{self.subset}.book"))

    def rows(self, part: str) -> Iterable[Row]:
        for number, line in enumerate((Path(self.root) / part).read_text().splitlines()):
            yield {"text": line, "id": f"{part}:{number}", "length": len(line)}

    def revision(self, part: str) -> str:
        return str((Path(self.root) / part).stat().st_mtime_ns)


@dataclass(frozen=True, kw_only=True)
class Plain(OwnSource):
    """Texts that need no file, some of them bad."""

    def parts(self) -> Iterable[str]:
        return ["a", "b"]

    def rows(self, part: str) -> Iterable[Row]:
        yield from (f"text {part} {n}" for n in range(300))
        yield ""
        yield "\ud800"


@dataclass(frozen=True, kw_only=True)
class Failing(OwnSource):
    def parts(self) -> Iterable[str]:
        return ["a"]

    def rows(self, part: str) -> Iterable[Any]:
        yield "good"
        raise ConnectionError("no such shelf")


@dataclass(frozen=True, kw_only=True)
class Numbers(Failing):
    def rows(self, part: str) -> Iterable[Any]:
        yield 7


class Unfinished(OwnSource):
    def parts(self) -> Iterable[str]:
        return ["a"]


class Slow(OwnEncoder):
    """The reference's ids, one text after the other."""

    def ids(self, text: str) -> Sequence[int]:
        return self.tokenizer.encode(text)


class Wrong(OwnEncoder):
    """Gives the ids backwards."""

    def ids(self, text: str) -> Sequence[int]:
        return self.tokenizer.encode(text)[::-1]
