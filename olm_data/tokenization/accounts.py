"""The accounts of a task while its batches come in: every record read ends in one count."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from olm_data.select.digests import DIGEST_BYTES
from olm_data.sources.account import (
    BAD_LOCATIONS,
    BAD_REASONS,
    INVALID,
    NO_TOKENS,
    InputAccount,
    invalid_text,
    unaccounted,
)
from olm_data.sources.base import InputFile, OnInvalid, Unit
from olm_data.tokenization.quarantine import Quarantine

if TYPE_CHECKING:
    from olm_data.tokenization.pipeline import EncodedBatch


class Accounts:
    """The accounts of a task's inputs while its batches come in."""

    def __init__(
        self, units: Iterable[Unit], inputs: Sequence[InputFile], on_invalid: OnInvalid
    ) -> None:
        self._inputs, self._on_invalid = inputs, on_invalid
        self._of: dict[int, InputAccount] = {}
        self._digests: dict[int, Any] = {}
        for unit in units:
            account = self._of.setdefault(unit.input, InputAccount(unit.input))
            account.units.append([unit.start, unit.stop])
            self._digests.setdefault(unit.input, hashlib.sha256())

    def add(self, batch: EncodedBatch, quarantine: Quarantine) -> None:
        """Count what a batch's records are before they are parted into splits."""
        if batch.rows_in != len(batch.inputs) + batch.lost:
            raise unaccounted(
                f"{batch.rows_in:,} records read, {len(batch.inputs):,} documents, "
                f"{batch.lost:,} left out",
                ", ".join(self._inputs[index].path for index in self._of),
            )
        for (index, reason), count in batch.skipped.items():
            self._of[index].dropped[reason] += count
        for index, count in batch.replaced.items():
            self._of[index].replaced += count
        if batch.special_hits:  # of a whole batch; the account of its first input carries them
            first = (*batch.inputs[:1].tolist(), *(drop.input for drop in batch.dropped))
            index = first[0] if first else next(iter(batch.skipped))[0]
            self._of[index].special_hits += batch.special_hits
        for drop in batch.dropped:
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
                    account.bad.append([drop.position, drop.reason, drop.detail])

    def split(self, batch: EncodedBatch, empty: np.ndarray, held_out: np.ndarray) -> None:
        """Count a batch's documents by split.

        Args:
            empty: bool [d], the text has no token.
            held_out: bool [d].
        """
        for first, last in runs(batch.inputs):
            index = int(batch.inputs[first])
            account = self._of[index]
            self._digests[index].update(batch.digests[first * DIGEST_BYTES : last * DIGEST_BYTES])
            none, held = empty[first:last], held_out[first:last]
            unknown = batch.unknown[first:last]
            account.unknown_tokens += int(unknown.sum())
            account.unknown_documents += int((unknown > 0).sum())
            if none.any():
                account.dropped[NO_TOKENS] += int(none.sum())
            account.held_out += int((held & ~none).sum())
            account.documents += int((~held & ~none).sum())

    def finished(self) -> list[InputAccount]:
        """Return the accounts, in order of first appearance, with their digests."""
        for index, account in self._of.items():
            account.sha256 = self._digests[index].hexdigest()
        return list(self._of.values())


def runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Return the [first, last) ranges of equal neighbours in a non-empty 1-D array."""
    cuts = (np.flatnonzero(np.diff(values)) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(values)], strict=True))
