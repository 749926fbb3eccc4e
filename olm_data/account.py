"""What became of every record: counts by input and reason, as commit records keep them."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

NO_TOKENS = "no_tokens"
"""Drop reason of this stage: the tokenizer makes no token of the text (it normalises all away)."""

BAD_REASONS = frozenset({"malformed", "invalid_utf8", "no_text"})
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
        bad: `[position, reason, detail]` of the first bad records.
        sha256: of the XXH3-128 digests of all documents' texts, concatenated in order.
    """

    input: int
    units: list[list[int]] = field(default_factory=list)
    documents: int = 0
    held_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    special_hits: int = 0
    bad: list[list[Any]] = field(default_factory=list)
    sha256: str = ""

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
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> InputAccount:
        """Return the account that `to_json` wrote."""
        return cls(**{**value, "dropped": Counter(value["dropped"])})


def input_digest(parts: list[str]) -> str:
    """Return an input's digest: sha256 of the raw digests of its parts, one a task, in order."""
    return hashlib.sha256(b"".join(bytes.fromhex(part) for part in parts)).hexdigest()
