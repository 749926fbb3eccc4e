"""The accounts of a task while its batches come in: every record read ends in one count."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from olm_data.dataset.account import (
    BAD_LOCATIONS,
    BAD_REASONS,
    INVALID,
    NO_TOKENS,
    BadRecord,
    InputAccount,
    invalid_text,
    pack,
    unaccounted,
)
from olm_data.dataset.choices import OnInvalid
from olm_data.dataset.inputs import InputFile, Unit
from olm_data.select.digests import DIGEST_BYTES
from olm_data.select.selection import IdSet
from olm_data.tokenization.batches import EncodedBatch
from olm_data.tokenization.quarantine import Quarantine


@dataclass
class _Counts:
    """One input's counts so far; attributes as in `InputAccount`."""

    units: list[tuple[int, int]] = field(default_factory=list)
    documents: int = 0
    held_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    special_hits: int = 0
    replaced: int = 0
    unknown_tokens: int = 0
    unknown_documents: int = 0
    bad: list[BadRecord] = field(default_factory=list)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)


class Accounts:
    """The accounts of a task's inputs while its batches come in."""

    def __init__(
        self, units: Iterable[Unit], inputs: Sequence[InputFile], on_invalid: OnInvalid
    ) -> None:
        self._inputs, self._on_invalid = inputs, on_invalid
        self._of: dict[int, _Counts] = {}
        for unit in units:
            self._of.setdefault(unit.input, _Counts()).units.append((unit.start, unit.stop))

    def add(self, batch: EncodedBatch, quarantine: Quarantine) -> None:
        """Count what a batch's records are before they are parted into splits."""
        read, special_hits = batch.read, batch.encoded.special_hits
        if read.rows_in != read.documents + batch.lost:
            raise unaccounted(
                f"{read.rows_in:,} records read, {read.documents:,} documents, "
                f"{batch.lost:,} left out",
                ", ".join(self._inputs[index].path for index in self._of),
            )
        for (index, reason), count in read.skipped.items():
            self._of[index].dropped[reason] += count
        for index, count in read.replaced.items():
            self._of[index].replaced += count
        if special_hits:  # of a whole batch; the account of its first input carries them
            first = (*read.inputs[:1].tolist(), *(drop.input for drop in read.dropped))
            index = first[0] if first else next(iter(read.skipped))[0]
            self._of[index].special_hits += special_hits
        for drop in read.dropped:
            account = self._of[drop.input]
            account.dropped[drop.reason] += 1
            if drop.reason == INVALID and self._on_invalid == "error":
                source = self._inputs[drop.input]
                raise invalid_text(
                    f"{source.path}, {source.position} {drop.position}: {drop.detail}"
                )
            if drop.reason in BAD_REASONS:
                quarantine.add(drop)
                if len(account.bad) < BAD_LOCATIONS:
                    account.bad.append(BadRecord(drop.position, drop.reason, drop.detail))

    def split(self, batch: EncodedBatch, empty: np.ndarray, held_out: np.ndarray) -> None:
        """Count a batch's documents by split.

        Args:
            empty: bool [d], the text has no token.
            held_out: bool [d].
        """
        for first, last in runs(batch.read.inputs):
            index = int(batch.read.inputs[first])
            account = self._of[index]
            account.digest.update(batch.digests[first * DIGEST_BYTES : last * DIGEST_BYTES])
            none, held = empty[first:last], held_out[first:last]
            unknown = batch.encoded.unknown[first:last]
            account.unknown_tokens += int(unknown.sum())
            account.unknown_documents += int((unknown > 0).sum())
            if none.any():
                account.dropped[NO_TOKENS] += int(none.sum())
            account.held_out += int((held & ~none).sum())
            account.documents += int((~held & ~none).sum())

    def finished(self, excluded: IdSet | None = None) -> list[InputAccount]:
        """Return the accounts, in order of first appearance, with their digests.

        Args:
            excluded: knows which of the ids to leave out the task met; told on its first input.
        """
        met = "" if excluded is None else pack(excluded.found)
        return [
            InputAccount(
                input=index,
                units=tuple(counts.units),
                documents=counts.documents,
                held_out=counts.held_out,
                dropped=dict(sorted(counts.dropped.items())),
                special_hits=counts.special_hits,
                bad=tuple(counts.bad),
                sha256=counts.digest.hexdigest(),
                excluded="" if place else met,
                replaced=counts.replaced,
                unknown_tokens=counts.unknown_tokens,
                unknown_documents=counts.unknown_documents,
            )
            for place, (index, counts) in enumerate(self._of.items())
        ]


def runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Return the [first, last) ranges of equal neighbours in a non-empty 1-D array."""
    cuts = (np.flatnonzero(np.diff(values)) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(values)], strict=True))
