"""What became of every record: counts by input and reason, as commit records keep them.

    records read = documents + held out + dropped, by reason        for each input of each task
    units in the accounts = units in the plan                       nothing read twice, nothing left

Pure: values in, values or an error out. Never: repairs or rounds a count that does not add up."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from olm_data.bounded_json import MalformedJson, Size
from olm_data.errors import InputError, ValidationError, printable

NO_TOKENS = "no_tokens"
"""Drop reason of this stage: the tokenizer makes no token of the text (it normalises all away)."""

INVALID = "invalid_utf8"
"""Drop reason that `--on-invalid` decides about."""

UNENCODABLE = "unencodable"
"""Drop reason of this stage: the tokenizer fails on the text, or makes a special token of it."""

BAD_REASONS = frozenset({"malformed", INVALID, "no_text", UNENCODABLE})
"""Drops that count against `--max-bad`; an empty document is no fault of the data."""

BAD_LOCATIONS = 10
"""Locations of bad records kept for each input of a task."""


@dataclass
class InputAccount:
    """What became of one input's records in one task. Every record read is in one of the counts.

    Attributes:
        input: index of the input in the plan.
        units: [start, stop) of the units read.
        documents: documents of the train split.
        held_out: documents of the validation split.
        dropped: records dropped, by reason.
        special_hits: strings in the text that spell a special token.
        replaced: records read (no drops) in whose text U+FFFD was put by `--on-invalid replace`.
        unknown_tokens: unknown tokens in the documents, held-out ones included.
        unknown_documents: documents, held-out ones included, with an unknown token.
        bad: `[position, reason, detail]` of the first bad records.
        sha256: of the XXH3-128 digests of all documents' texts, concatenated in order.
        excluded: which ids of `--exclude-ids` the task met, see `pack`; on its first input.
    """

    input: int
    units: list[list[int]] = field(default_factory=list)
    documents: int = 0
    held_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    special_hits: int = 0
    replaced: int = 0
    unknown_tokens: int = 0
    unknown_documents: int = 0
    bad: list[list[Any]] = field(default_factory=list)
    sha256: str = ""
    excluded: str = ""

    @property
    def documents_in(self) -> int:
        """All records read."""
        return self.documents + self.held_out + sum(self.dropped.values())

    def to_json(self) -> dict[str, Any]:
        """Return the account as stored in the commit record."""
        return {
            "input": self.input,
            "units": self.units,
            "documents": self.documents,
            "held_out": self.held_out,
            "dropped": dict(sorted(self.dropped.items())),
            "special_hits": self.special_hits,
            "bad": self.bad,
            "sha256": self.sha256,
        } | {
            name: value
            for name, value in (
                ("excluded", self.excluded),
                ("replaced", self.replaced),
                ("unknown_tokens", self.unknown_tokens),
                ("unknown_documents", self.unknown_documents),
            )
            if value
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> InputAccount:
        """Return the account that `to_json` wrote.

        Raises:
            MalformedJson: it is none.
        """
        try:
            stored = msgspec.to_builtins(msgspec.convert(value, _Stored))
        except msgspec.ValidationError as error:
            raise MalformedJson(printable(str(error))[:200]) from None
        return cls(**{**stored, "dropped": Counter(stored["dropped"])})


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of an `InputAccount`, as a commit record may hold them."""

    input: Size
    units: list[tuple[Size, Size]]
    documents: Size
    held_out: Size
    dropped: dict[str, Size]
    special_hits: Size
    bad: list[tuple[Size, str, str]]
    sha256: Annotated[str, msgspec.Meta(pattern="^(?:[0-9a-f]{64})?$")]
    excluded: str = ""
    replaced: Size = 0
    unknown_tokens: Size = 0
    unknown_documents: Size = 0


def totals_by_input(accounts: Sequence[InputAccount]) -> dict[int, InputAccount]:
    """Return one account for each input: the sums over its tasks, in order of the inputs.

    `units`, `bad` and `sha256` are a task's own and stay empty.
    """
    totals: dict[int, InputAccount] = {}
    for account in sorted(accounts, key=lambda account: account.input):
        total = totals.setdefault(account.input, InputAccount(account.input))
        total.documents += account.documents
        total.held_out += account.held_out
        total.dropped.update(account.dropped)
        total.special_hits += account.special_hits
        total.replaced += account.replaced
        total.unknown_tokens += account.unknown_tokens
        total.unknown_documents += account.unknown_documents
    return totals


def check_accounts(
    where: str,
    units: Sequence[Sequence[int]],
    accounts: Sequence[InputAccount],
    *,
    documents: int,
    held_out: int,
    dropped: dict[str, int],
) -> None:
    """Check the accounts of one task against its plan and its shards.

    Args:
        where: the task, for the message.
        units: `[input, start, stop, ...]` of the plan.
        documents, held_out: documents in the task's train and validation shard.
        dropped: drops by reason in the commit record.

    Raises:
        ValidationError: they do not add up.
    """
    read = [[a.input, *unit] for a in accounts for unit in a.units]
    planned = [list(unit[:3]) for unit in units]
    if sorted(read) != sorted(planned):
        raise unaccounted("the units read are not the units planned", where)
    sums: Counter[str] = Counter()
    for account in accounts:
        sums.update(account.dropped)
    for what, counted, stored in (
        ("documents", sum(a.documents for a in accounts), documents),
        ("documents held out", sum(a.held_out for a in accounts), held_out),
        ("drops", dict(sums), dict(dropped)),
    ):
        if counted != stored:
            raise unaccounted(f"{what}: {counted} by input, {stored} in the shard", where)


def invalid_text(where: str) -> InputError:
    """Return the error of `--on-invalid error`."""
    return InputError(
        "text that is not valid UTF-8, or holds a lone surrogate",
        where=where,
        why="--on-invalid error says to stop at the first",
        fix="fix the input, or take --on-invalid skip (into the quarantine) or replace (U+FFFD)",
    )


def unaccounted(what: str, where: str) -> ValidationError:
    """Return the error for counts that do not add up."""
    return ValidationError(
        f"the account does not add up: {what}",
        where=where,
        why="a document would be lost, or be there twice, without a word",
        fix="this is a defect of olm-data; nothing was published: please report it",
    )


def pack(found: np.ndarray) -> str:
    """Return bool [n] as base64 of the zlib-compressed gaps (uint32) between its true values."""
    gaps = np.diff(np.flatnonzero(found), prepend=0).astype("<u4")
    return base64.b64encode(zlib.compress(gaps.tobytes(), 6)).decode() if len(gaps) else ""


def unpack(packed: str, size: int) -> np.ndarray:
    """Return the bool [size] that `pack` was given.

    Raises:
        ValueError: it was not given so many.
    """
    found = np.zeros(size, bool)
    if packed:
        try:
            data = zlib.decompressobj().decompress(base64.b64decode(packed), 4 * size + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        places = np.cumsum(np.frombuffer(data[: len(data) & ~3], "<u4"), dtype=np.int64)
        if len(data) > 4 * size or (len(places) and int(places[-1]) >= size):
            raise ValueError(f"more than {size:,} values")
        found[places] = True
    return found


def input_digest(parts: list[str]) -> str:
    """Return an input's digest: sha256 of the raw digests of its parts, one a task, in order."""
    return hashlib.sha256(b"".join(bytes.fromhex(part) for part in parts)).hexdigest()
