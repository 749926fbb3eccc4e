"""What the loss ledger says of a whole run: sources and positions over time, and what was learned.

    ledger files -> sums by (source, part of the run), (position, part), (document, epoch)
                 -> LedgerSummary: curves; never learned; memorised at the second epoch

Files are read one by one and added up, so that memory holds sums by document and not pieces. Losses
are nats a label.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from olm_data import printing
from olm_data.counts import counted
from olm_data.errors import UsageError, suggest
from olm_data.extensions.ledger.files import read_ledger
from olm_data.extensions.show.ledger import check_ledger, mean_loss, no_step, not_finite
from olm_data.printing import Change, Loss, cell, fitted

PERIODS = 10
"""Parts of the run that sources and positions are shown over."""
FEWEST_LABELS = 8
"""Labels that a document must have in an epoch to be called learned or not."""

Sums = dict[tuple[int, ...], tuple[float, int]]
"""(nats, labels) by keys."""


class LearnedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document that was seen in several epochs of its source.

    Attributes:
        first, last: its loss in the first and in the last epoch it was seen in.
        second: in the second one.
        above: `last` beyond the mean of its source in that epoch.
        drop: `first` less `second`, beyond the drop of the mean of its source.
    """

    address: str
    epochs: int
    labels: int
    first: Loss
    second: Loss
    last: Loss
    above: Change
    drop: Change


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """The mean loss over parts of the run; None where there was none."""

    name: str
    labels: int
    losses: list[Loss | None]


class LedgerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All of a ledger, or one source of it.

    Attributes:
        first, last: steps.
        missing: steps between them that the ledger lacks.
        until: last step of each part of the run.
        sources: by source.
        positions: by where in its document a piece begins: 0, 1 to 127, 128 to 255, ...
        repeated: documents seen in two epochs or more.
        never_learned: those among them furthest above their source in their last epoch.
        memorised: those whose loss fell most from their first to their second epoch.
    """

    first: int
    last: int
    missing: int
    pieces: int
    labels: int
    not_finite: int
    until: list[int]
    sources: list[Curve]
    positions: list[Curve]
    repeated: int
    never_learned: list[LearnedDocument]
    memorised: list[LearnedDocument]

    def lines(self) -> list[str]:
        """Return for people curves by source and position, then what was learned of documents."""
        missing = f"note: {self.missing:,} of these steps are not in the ledger"
        found = [
            f"steps {self.first:,} to {self.last:,}: {counted(self.pieces, 'piece')} of documents, "
            f"{self.labels:,} labels",
            *[missing] * (self.missing > 0),
            *not_finite(self.not_finite),
        ]
        for head, curves in (("source", self.sources), ("position", self.positions)):
            rows = [
                [one.name, cell(one.labels), *(cell(loss, ".4f") for loss in one.losses)]
                for one in curves
            ]
            until = (f"..{step:,}" for step in self.until)
            found += ["", *fitted([head, "labels", *until], rows)]
        if not self.repeated:
            return [*found, "", "no document was seen in two epochs yet"]
        repeated = f"{counted(self.repeated, 'document')} seen in two epochs or more; never learned"
        for title, documents in (
            (repeated, self.never_learned),
            ("memorised at the second epoch", self.memorised),
        ):
            found += ["", f"{title}:", *printing.table(documents, *LEARNED)]
        return found


LEARNED = (
    *("address=document", "epochs", "labels", "first", "second", "last"),
    *("above=above source", "drop"),
)


def summarise(folder: Path, most: int, source: str | None = None) -> LedgerSummary:
    """Return what all of a ledger says; of one source if given, `most` documents in each list.

    Raises:
        InputError: the run has no ledger.
        UsageError: there is no such source in it.
        ValidationError: a file is not one that a run writes.
    """
    first, last, seen = _extent(folder)
    width = max(1, math.ceil((last - first + 1) / PERIODS))
    names: list[str] = []
    by_source: Sums = {}
    by_position: Sums = {}
    by_document: Sums = {}
    pieces = not_finite = 0
    for _, table in read_ledger(folder, _ADDED):
        finite = table.filter(pc.is_finite(table["nats"]))
        not_finite += table.num_rows - finite.num_rows
        number = source_numbers(finite["source"], names)
        kept = slice(None) if source is None else np.isin(number, _index(names, source))
        step, document, start, epoch, labels, nats = (
            finite[name].to_numpy()[kept] for name in _ADDED if name != "source"
        )
        number, period = number[kept], (step - first) // width
        _add(by_source, (number, period), nats, labels)
        _add(
            by_position,
            (np.searchsorted(POSITION_EDGES, start, side="right"), period),
            nats,
            labels,
        )
        _add(by_document, (number, document, epoch), nats, labels)
        pieces += len(nats)
    if source is not None and source not in names:
        raise UsageError(f"the ledger has no source {source!r}", fix=suggest(source, names))
    until = [min(last, end) for end in range(first + width - 1, last + width, width)]
    repeated = _repeated(by_document, names)
    return LedgerSummary(
        first=first,
        last=last,
        missing=last - first + 1 - seen,
        pieces=pieces,
        labels=sum(count for _, count in by_source.values()),
        not_finite=not_finite,
        until=until,
        sources=_curves(by_source, names, len(until)),
        positions=_curves(by_position, POSITION_NAMES, len(until)),
        repeated=len(repeated),
        never_learned=sorted(repeated, key=lambda one: -one.above)[:most],
        memorised=sorted(repeated, key=lambda one: -one.drop)[:most],
    )


_ADDED = ("step", "source", "document", "start", "epoch", "tokens", "nats")
POSITION_EDGES = (1, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
POSITION_NAMES = ["0", *(f"{a:,} to {b - 1:,}" for a, b in pairwise(POSITION_EDGES))]
POSITION_NAMES.append(f"from {POSITION_EDGES[-1]:,}")


def source_numbers(column: pa.ChunkedArray, names: list[str]) -> np.ndarray[Any, Any]:
    """Return the source of each piece as its place in `names`, to which new ones are added."""
    encoded = column.unify_dictionaries().combine_chunks()
    if not len(encoded):
        return np.zeros(0, np.int64)
    own = encoded.dictionary.to_pylist()
    names += [name for name in own if name not in names]
    found: np.ndarray[Any, Any] = np.array([names.index(name) for name in own])[
        encoded.indices.to_numpy()
    ]
    return found


def _index(names: Sequence[str], name: str) -> list[int]:
    return [number for number, each in enumerate(names) if each == name]


def _extent(folder: Path) -> tuple[int, int, int]:
    """Return the first and the last step of a ledger, and how many it has."""
    check_ledger(folder)
    seen: set[int] = set()
    for _, table in read_ledger(folder, ["step"]):
        seen |= set(pc.unique(table["step"]).to_pylist())
    if not seen:
        raise no_step(folder, 1)
    return min(seen), max(seen), len(seen)


def _add(
    sums: Sums,
    keys: Sequence[np.ndarray[Any, Any]],
    nats: np.ndarray[Any, Any],
    labels: np.ndarray[Any, Any],
) -> None:
    """Add nats and labels to those of the same keys."""
    if not len(nats):
        return
    columns = {f"k{i}": key for i, key in enumerate(keys)}
    table = pa.table({**columns, "nats": nats, "labels": labels})
    grouped = table.group_by(list(columns), use_threads=False).aggregate(
        [("nats", "sum"), ("labels", "sum")]
    )
    lists = [grouped[name].to_pylist() for name in columns]
    for *key, more, count in zip(
        *lists, grouped["nats_sum"].to_pylist(), grouped["labels_sum"].to_pylist(), strict=True
    ):
        before = sums.get(tuple(key), (0.0, 0))
        sums[tuple(key)] = before[0] + more, before[1] + count


def _curves(sums: Sums, names: Sequence[str], periods: int) -> list[Curve]:
    curves = []
    for number in sorted({key[0] for key in sums}):
        mine = [sums.get((number, period), (0.0, 0)) for period in range(periods)]
        losses = [mean_loss(nats, labels) if labels else None for nats, labels in mine]
        labels = sum(labels for _, labels in mine)
        curves.append(Curve(name=names[number], labels=labels, losses=losses))
    return curves


def _repeated(sums: Sums, names: Sequence[str]) -> list[LearnedDocument]:
    """Return the documents that were seen in several epochs."""
    means: dict[tuple[int, int], tuple[float, int]] = {}
    epochs: dict[tuple[int, int], list[int]] = {}
    for (source, document, epoch), (nats, labels) in sums.items():
        before = means.get((source, epoch), (0.0, 0))
        means[source, epoch] = before[0] + nats, before[1] + labels
        if labels >= FEWEST_LABELS:
            epochs.setdefault((source, document), []).append(epoch)
    found = []
    for (source, document), seen in epochs.items():
        if len(seen) < 2:
            continue
        seen.sort()
        first, second, last = (mean_loss(*sums[source, document, seen[n]]) for n in (0, 1, -1))
        usual = [mean_loss(*means[source, seen[n]]) for n in (0, 1, -1)]
        found.append(
            LearnedDocument(
                address=f"{names[source]}:{document}",
                epochs=len(seen),
                labels=sums[source, document, seen[-1]][1],
                first=first,
                second=second,
                last=last,
                above=last - usual[2],
                drop=first - second - (usual[0] - usual[1]),
            )
        )
    return found
