"""What made a dataset, and what was counted of it beside its shards: informational, not digested.

    Tools --stored--> manifest.json, `tools`: one flat object of texts --Tools.of--> Tools

Whoever edits that part of a manifest changes nothing that is relied on, so what cannot be read of
it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from olm_data.bounded_json import MalformedJson, decode

PASSED_REASONS: dict[str, str] = {
    "format": "the name tells no format that is read",
    "about": "it tells about the records beside it, as README and LICENSE do",
    "hidden": "its name begins with a dot",
    "empty": "it holds no bytes",
    "link": "a link to a folder is not followed",
    "special": "a pipe, a socket or a device",
    "metadata": "it describes a saved dataset and holds no documents",
    "unlisted": "state.json of the saved dataset does not name it",
    "folder": "the pattern does not descend into it",
    "dataset": "a file of a dataset of olm-data",
    "sidecar": "the token file that it describes is not here",
    "size": "it is too short or too long for a document of pylib",
    "copy": "another file of pylib has the same text",
}
"""Why something is passed over; the order of the lines."""

NAMES_KEPT = 20
"""Names of what was passed over that are kept of each reason."""


class PassedCount(msgspec.Struct, frozen=True):
    """How many were passed over for one reason, and the first of their names."""

    count: int
    names: list[str]


class Copies(msgspec.Struct, frozen=True):
    """Exact copies among the documents of all splits, and what the texts are called.

    Attributes:
        duplicates, duplicate_bytes: documents that equal an earlier one, and bytes of their texts.
        content: 32 hexadecimal digits that name the texts, in any order; None in manifests without.
    """

    duplicates: int
    duplicate_bytes: int
    content: str | None = None

    def stored(self) -> dict[str, str]:
        """Return what `Tools.of` reads again: texts by name."""
        counts = msgspec.to_builtins(self)
        return {name: str(value) for name, value in counts.items() if value is not None}


class Tools(msgspec.Struct, frozen=True, kw_only=True):
    """The informational part of a manifest.

    Attributes:
        versions: of olm-data, Python and packages, by name.
        encoder, tokenizer: what they are called; None where nothing is known of them.
        passed_over: what lay among the inputs and was not read, by reason.
        copies: None where they were not counted.
    """

    versions: dict[str, str] = {}
    encoder: str | None = None
    tokenizer: str | None = None
    passed_over: dict[str, PassedCount] = {}
    copies: Copies | None = None

    def stored(self) -> dict[str, str]:
        """Return what `of` reads again: texts by name."""
        found = dict(self.versions)
        for name, text in (("encoder", self.encoder), ("tokenizer", self.tokenizer)):
            found |= {} if text is None else {name: text}
        if self.passed_over:
            found["passed_over"] = msgspec.json.encode(self.passed_over).decode()
        if self.copies is not None:
            found |= self.copies.stored()
        return found

    @classmethod
    def of(cls, stored: Mapping[str, str]) -> Tools:
        """Read what `stored` returned, as far as it can be read."""
        found = dict(stored)
        numbers = [found.pop(name, "") for name in ("duplicates", "duplicate_bytes")]
        content, passed = found.pop("content", None), found.pop("passed_over", "{}")
        copies = None
        if all(text.isdecimal() and len(text) < 20 for text in numbers):
            copies = Copies(int(numbers[0]), int(numbers[1]), content)
        try:
            counts = merged(decode(passed.encode(), dict[str, PassedCount]), {})
        except (MalformedJson, UnicodeError):
            counts = {}
        return cls(
            encoder=found.pop("encoder", None),
            tokenizer=found.pop("tokenizer", None),
            versions=found,
            passed_over=counts,
            copies=copies,
        )


def merged(
    one: Mapping[str, PassedCount], other: Mapping[str, PassedCount]
) -> dict[str, PassedCount]:
    """Return the sums of two counts."""
    none = PassedCount(0, [])
    return {
        reason: PassedCount(
            one.get(reason, none).count + other.get(reason, none).count,
            [*one.get(reason, none).names, *other.get(reason, none).names][:NAMES_KEPT],
        )
        for reason in PASSED_REASONS
        if reason in one or reason in other
    }
