"""Steps that were spikes or not finite, each with its documents: read and written here only.

bad-step00000012.json, spike-step00000012.json   <- BadStep, beside the log of the run
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec

from olm_data.bounded_json import MalformedJson, Size, decode
from olm_data.regular_files import read_regular
from olm_data.run_log.lines import malformed_log
from olm_data.storage.disk import write_durable

_NAME = re.compile(r"(bad|spike)-step([0-9]{1,18})\.json")


class BadDocument(msgspec.Struct, frozen=True):
    """A document of a row, as `olm_data.rows.views.DocumentView` has it."""

    id: str | None
    input: str
    position: Size
    position_kind: str
    shard: str
    document: Size
    start: Size
    stop: Size


class BadRow(msgspec.Struct, frozen=True):
    """A row of a bad step, and where it comes from."""

    row: Size
    stage: str | None
    source: str | None
    documents: list[BadDocument]


class BadStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step whose loss or gradient norm, spelt out here, is a spike or not finite.

    Attributes:
        incomplete: why not all rows could be read.
    """

    step: Size
    loss: str
    grad_norm: str
    incomplete: str | None = None
    rows: list[BadRow]

    def write(self, path: Path) -> None:
        """Write it, durably."""
        write_durable(path, json.dumps(msgspec.to_builtins(self), indent=1).encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> BadStep:
        """Read one.

        Raises:
            ValidationError: the file is malformed.
        """
        try:
            return decode(read_regular(path), cls)
        except MalformedJson as error:
            raise malformed_log(path, str(error)) from None

    def places(self) -> list[str]:
        """Return where each document was read: source, file, row or line."""
        return [
            f"{row.source} {piece.input} {piece.position_kind} {piece.position}"
            for row in self.rows
            for piece in row.documents
        ]


def bad_step_files(folder: Path) -> list[tuple[int, str, Path]]:
    """Return (step, "bad" or "spike", path) of those of a run folder, by step."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("*-step*.json"))
    return sorted((int(name[2]), name[1], path) for name, path in found if name)
