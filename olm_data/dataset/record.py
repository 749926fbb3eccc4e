"""The commit record of a shard, `shard-00000.json`: there if and only if the rest is complete.

    ShardRecord.encode -> bytes -> ShardRecord.decode, checked against the manifest's digest

Read by whoever must know what a shard holds without opening it: reruns, manifests, verification.
Specified in docs/reference/format.md.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated

import msgspec

from olm_data.bounded_json import MalformedJson, Size, decode
from olm_data.dataset.account import InputAccount
from olm_data.dataset.windows import WIDTHS, Counts
from olm_data.decoding import decode_typed
from olm_data.errors import ValidationError, printable
from olm_data.storage.json_file import read_json
from olm_data.storage.store import Store

RECORD = ".json"
BLOCK_BYTES = 1 << 16
_HEX = re.compile(r"[0-9a-f]*+")


class FileInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size in bytes and sha256 of one file."""

    bytes: Size
    sha256: str


class Blocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """zlib.crc32 of each `bytes`-sized block of the tokens file, 8 hex digits a block."""

    bytes: Size
    crc32: str

    def crc(self, block: int) -> int:
        """Return the checksum of block `block`."""
        return int(self.crc32[block * 8 : block * 8 + 8], 16)


class ImportedFile(msgspec.Struct, frozen=True, kw_only=True):
    """The unit of an imported shard: its input, and how many documents lack the EOS id."""

    input: Size
    not_ended: Size = 0


def encode_units(units: Sequence[InputAccount | ImportedFile]) -> msgspec.Raw:
    """Return the units of a task, all of one kind, as a record holds them."""
    return msgspec.Raw(msgspec.json.encode(units, order="sorted"))


class ShardRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The commit record of a shard."""

    version: int
    name: str
    plan: str
    tokens: Size
    documents: Size
    text_bytes: Size
    max_token_id: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 32)]  # -1 where there is no token
    files: dict[str, FileInfo]
    blocks: Blocks
    # of each input an `InputAccount`, or of an imported file an `ImportedFile`; see `encode_units`
    units: msgspec.Raw
    dropped: dict[str, Size]
    windows: dict[str, Counts]

    @property
    def accounts(self) -> list[InputAccount]:
        """What became of the records of each input of the task, in input order.

        Raises:
            MalformedJson: the record has none; that of a validation split is empty.
        """
        try:
            return decode_typed(self.units, list[InputAccount])
        except msgspec.ValidationError as error:
            raise MalformedJson(printable(str(error))[:200]) from None

    @property
    def not_ended(self) -> int:
        """Of imported token files, the documents whose last token is not the EOS id."""
        return sum(unit.not_ended for unit in _imported(self.units))

    def encode(self) -> bytes:
        """Return the record's bytes as stored."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1) + b"\n"

    @classmethod
    def parse(cls, data: bytes) -> ShardRecord:
        """Return the record in these bytes, whatever shard it is of.

        Raises:
            MalformedJson: there is none.
        """
        record = decode(data, cls)
        if record.windows.keys() - WIDTHS:
            raise MalformedJson("windows that are never counted")
        try:
            _imported(record.units)
        except msgspec.ValidationError as error:
            raise MalformedJson(printable(str(error))[:200]) from None
        units = msgspec.Raw(msgspec.json.format(record.units, indent=-1))
        return msgspec.structs.replace(record, units=units)

    @classmethod
    def decode(cls, data: bytes, url: str, *, sha256: str, token_bytes: int) -> ShardRecord:
        """Return the record that was read from `url`.

        Args:
            sha256: its digest, from the manifest.
            token_bytes: size of the tokens file.

        Raises:
            ValidationError: it is another one, or malformed.
        """
        if hashlib.sha256(data).hexdigest() != sha256:
            raise damaged(url, "the commit record does not match its digest in the manifest")
        try:
            record = cls.parse(data)
        except MalformedJson as error:
            raise damaged(url, f"the commit record is malformed: {error}") from error
        blocks = record.blocks
        digits = 8 * -(-token_bytes // max(blocks.bytes, 1))
        if blocks.bytes < 1 or len(blocks.crc32) != digits or not _HEX.fullmatch(blocks.crc32):
            raise damaged(url, "the commit record has no checksum for each block")
        return record


def _imported(units: msgspec.Raw) -> list[ImportedFile]:
    """Return what all units have: accounts are read as files of which every document ends."""
    return decode_typed(units, list[ImportedFile])


class _PlanOf(msgspec.Struct, frozen=True):
    """Of a commit record, only whose it is."""

    plan: str


def stored_plan(store: Store, name: str) -> str | None:
    """Return the plan of a shard's commit record, None where there is none that can be read."""
    try:
        return decode(read_json(store, name + RECORD), _PlanOf).plan
    except (FileNotFoundError, NotADirectoryError, MalformedJson):
        return None


def damaged(url: str, what: str) -> ValidationError:
    """Return the error for a file of a shard that is not as it was written."""
    return ValidationError(
        what,
        where=url,
        why="training on it would feed the model other tokens than were written",
        fix="restore the file from a copy, or tokenise its inputs again into a new output",
    )
