"""What became of every record: counts by input and reason, as commit records keep them.

    records read = documents + held out + dropped, by reason        for each input of each task
    units in the accounts = units in the plan                       nothing read twice, nothing left

Pure: values in, values or an error out."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
import numpy as np

from olm_data.bounded_json import Size, Sparse
from olm_data.dataset.inputs import Unit
from olm_data.decompress import DecompressionError, unpacked
from olm_data.errors import InputError, ValidationError

DROP_REASONS: dict[str, str] = {
    "empty": "the text is empty or white space only",
    "no_text": "the text is missing, null or not a string",
    "malformed": "the record is damaged, or the line not a JSON object",
    "invalid_utf8": "the text is not valid UTF-8, or holds a lone surrogate",
    "unencodable": "the tokenizer has no ids for the text that may stand in a document",
    "bad_chat": "the row is no conversation: its messages, a role or a flag",
    "template": "the chat template refuses the conversation, or leaves out a part of it",
    "span": "it cannot be proved that what is to be trained is just that",
}

SKIP_REASONS: dict[str, str] = {
    "filtered": "the record does not match --where",
    "no_html": "the record of the archive is no page of HTML",
    "excluded": "its id is in --exclude-ids",
    "unsampled": "it was not drawn by --sample",
    "rejected": "the function of --filter does not keep it",
    "duplicate": "the same text was read before (--dedup)",
    "too_long": "the conversation has more tokens than --max-tokens",
    "untrained": "no token of the conversation would be trained",
    "near_duplicate": "nearly the same text was read before (--dedup minhash)",
    "contaminated": "it shares words in a row with evaluation texts (--decontaminate)",
    "unknown": "the tokenizer does not know a character or word of the text (--on-unknown drop)",
}

NO_TOKENS = "no_tokens"
"""Drop reason of this stage: the tokenizer makes no token of the text (it normalises all away)."""

REJECTED = "rejected"
"""Skip reason of `--filter`, alone or before the function's own: `rejected: too short`."""

CONTAMINATED = "contaminated"
"""Skip reason of `--decontaminate`."""

INVALID = "invalid_utf8"
"""Drop reason that `--on-invalid` decides about."""

UNENCODABLE = "unencodable"
"""Drop reason of this stage: the tokenizer fails on the text, or makes a special token of it."""

BAD_REASONS = frozenset(
    {"malformed", INVALID, "no_text", UNENCODABLE, "bad_chat", "template", "span"}
)
"""Drops that count against `--max-bad`; an empty document is no fault of the data."""

BAD_LOCATIONS = 10
"""Locations of bad records kept for each input of a task."""


def meaning(reason: str) -> str:
    """Return what a reason means, in words."""
    known = DROP_REASONS | SKIP_REASONS | {NO_TOKENS: "the tokenizer makes no token of the text"}
    return known.get(reason.partition(":")[0], "dropped")


class BadRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A record that was dropped as bad: its place in the input, and why."""

    position: Size
    reason: str
    detail: str


class InputAccount(Sparse, frozen=True, kw_only=True):
    """What became of one input's records in one task. Every record read is in one of the counts.

    Attributes:
        input: index of the input in the plan.
        units: [start, stop) of the units read.
        documents: documents of the train split.
        held_out: documents of the validation split.
        dropped: records dropped, by reason.
        special_hits: strings in the text that spell a special token.
        bad: the first bad records.
        sha256: of the XXH3-128 digests of all documents' texts, concatenated in order.
        excluded: which ids of `--exclude-ids` the task met, see `pack`; on its first input.
        replaced: records read (no drops) in whose text U+FFFD was put by `--on-invalid replace`.
        unknown_tokens: unknown tokens in the documents, held-out ones included.
        unknown_documents: documents, held-out ones included, with an unknown token.
        cut: documents, held-out ones included, that were cut for their length.
    """

    input: Size
    units: tuple[tuple[Size, Size], ...]
    documents: Size
    held_out: Size
    dropped: dict[str, Size]
    special_hits: Size
    bad: tuple[BadRecord, ...]
    sha256: Annotated[str, msgspec.Meta(pattern="^(?:[0-9a-f]{64})?$")]
    excluded: str = ""
    replaced: Size = 0
    unknown_tokens: Size = 0
    unknown_documents: Size = 0
    cut: Size = 0

    @property
    def documents_in(self) -> int:
        """All records read."""
        return self.documents + self.held_out + sum(self.dropped.values())


NUMBERS = (
    *("documents", "held_out", "special_hits", "replaced"),
    *("unknown_tokens", "unknown_documents", "cut"),
)
"""Of the fields of an `InputAccount`, those that add up over its tasks."""


def totals_by_input(accounts: Iterable[InputAccount]) -> dict[int, InputAccount]:
    """Return one account for each input: the sums over its tasks, in order of the inputs.

    `units`, `bad`, `sha256` and `excluded` are a task's own and stay empty.
    """
    tasks: dict[int, list[InputAccount]] = {}
    for account in accounts:
        tasks.setdefault(account.input, []).append(account)
    return {index: _total(tasks[index]) for index in sorted(tasks)}


def _total(accounts: Sequence[InputAccount]) -> InputAccount:
    return InputAccount(
        input=accounts[0].input,
        units=(),
        dropped=dropped_of(accounts),
        bad=(),
        sha256="",
        **{name: sum(getattr(account, name) for account in accounts) for name in NUMBERS},
    )


def dropped_of(accounts: Iterable[InputAccount]) -> Counter[str]:
    """Return the records dropped in all accounts, by reason."""
    dropped: Counter[str] = Counter()
    for account in accounts:
        dropped.update(account.dropped)
    return dropped


def check_accounts(
    where: str,
    units: Sequence[Unit],
    accounts: Sequence[InputAccount],
    *,
    documents: int,
    held_out: int,
    dropped: dict[str, int],
) -> None:
    """Check the accounts of one task against its plan and its shards.

    Args:
        where: the task, for the message.
        units: of the plan.
        documents, held_out: documents in the task's train and validation shard.
        dropped: drops by reason in the commit record.

    Raises:
        ValidationError: they do not add up.
    """
    read = [(a.input, *unit) for a in accounts for unit in a.units]
    planned = [(unit.input, unit.start, unit.stop) for unit in units]
    if sorted(read) != sorted(planned):
        raise unaccounted("the units read are not the units planned", where)
    for what, counted, stored in (
        ("documents", sum(a.documents for a in accounts), documents),
        ("documents held out", sum(a.held_out for a in accounts), held_out),
        ("drops", dict(dropped_of(accounts)), dict(dropped)),
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
            data = unpacked(base64.b64decode(packed), "zlib", 4 * size)
        except DecompressionError as error:
            raise ValueError(str(error)) from None
        places = np.cumsum(np.frombuffer(data[: len(data) & ~3], "<u4"), dtype=np.int64)
        if len(places) and int(places[-1]) >= size:
            raise ValueError(f"more than {size:,} values")
        found[places] = True
    return found


def input_digest(parts: list[str]) -> str:
    """Return an input's digest: sha256 of the raw digests of its parts, one a task, in order."""
    return hashlib.sha256(b"".join(bytes.fromhex(part) for part in parts)).hexdigest()
