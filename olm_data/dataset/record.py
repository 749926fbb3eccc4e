"""The commit record of a shard, `shard-00000.json`: there if and only if the rest is complete.

    ShardRecord.encode -> bytes -> ShardRecord.decode, checked against the manifest's digest

Read by whoever must know what a shard holds without opening it: reruns, manifests, verification.
Specified in docs/reference/format.md.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any

import msgspec
import numpy as np

from olm_data.bounded_json import MalformedJson, Size, decode
from olm_data.dataset.account import InputAccount
from olm_data.errors import ValidationError, printable
from olm_data.storage.json_file import read_json
from olm_data.storage.store import Store

RECORD = ".json"
BLOCK_BYTES = 1 << 16
WINDOWS = tuple(1 << k for k in range(6, 21))  # 64 .. 1,048,576 tokens
_WIDTHS = {str(width) for width in WINDOWS}
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
    not_ended: Size


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
    # of each input an account, or of what was imported a count; see `accounts` and `not_ended`
    units: list[dict[str, Any]]
    dropped: dict[str, Size]
    # width -> [most document starts in a window, in the first, in the last]
    windows: dict[str, tuple[Size, Size, Size]]

    @property
    def accounts(self) -> list[InputAccount]:
        """What became of the records of each input of the task, in input order.

        Raises:
            MalformedJson: the record has none; that of a validation split is empty.
        """
        try:
            return msgspec.convert(self.units, list[InputAccount])
        except msgspec.ValidationError as error:
            raise MalformedJson(printable(str(error))[:200]) from None

    @property
    def not_ended(self) -> int:
        """Of imported token files, the documents whose last token is not the EOS id."""
        counts = (unit.get("not_ended", 0) for unit in self.units)
        return sum(count for count in counts if isinstance(count, int))

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
        if record.windows.keys() - _WIDTHS:
            raise MalformedJson("windows that are never counted")
        return record

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


class _PlanOf(msgspec.Struct, frozen=True):
    """Of a commit record, only whose it is."""

    plan: str


def stored_plan(store: Store, name: str) -> str | None:
    """Return the plan of a shard's commit record, None where there is none that can be read."""
    try:
        return decode(read_json(store, name + RECORD), _PlanOf).plan
    except (FileNotFoundError, NotADirectoryError, MalformedJson):
        return None


def window_counts(ends: np.ndarray) -> dict[str, tuple[int, int, int]]:
    """Count document starts in windows of 64, 128, ... tokens of one shard.

    Args:
        ends: uint64 [documents], cumulative document ends in tokens.

    Returns:
        width -> [most starts in any window, starts in the first, in the last `width` tokens], up to
        the first width that covers the shard.
    """
    if not len(ends):
        return {}
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    tokens, rank = int(ends[-1]), np.arange(len(starts))
    counts = {}
    for width in WINDOWS:
        most = int((np.searchsorted(starts, starts + width) - rank).max())
        first = int(np.searchsorted(starts, width))
        last = len(starts) - int(np.searchsorted(starts, tokens - width))
        counts[str(width)] = (most, first, last)
        if width >= tokens:
            break
    return counts


def damaged(url: str, what: str) -> ValidationError:
    """Return the error for a file of a shard that is not as it was written."""
    return ValidationError(
        what,
        where=url,
        why="training on it would feed the model other tokens than were written",
        fix="restore the file from a copy, or tokenise its inputs again into a new output",
    )
