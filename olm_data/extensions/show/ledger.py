"""What the loss ledger of a run says of a step, and of a document.

    ledger files -> StepLosses      what made a step's loss higher than its sources' is
                 -> DocumentLosses  what a document cost each time it was seen

Losses are nats a label. The excess of a piece is its nats beyond what its source's mean would give
for as many labels: the excesses of a step add up to how far it is above its sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from olm_data.errors import InputError, UsageError, printable, suggest
from olm_data.extensions.ledger.files import LEDGER, ledger_files, read_ledger
from olm_data.printing import Change, Columns, Excess, Loss

BEFORE = 20
"""Steps before a step whose mean it is compared with."""


class SourceLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Pieces of a source in a step.

    Attributes:
        usual: its mean in the `BEFORE` steps before, None where it was not seen there.
        excess: nats beyond that mean.
    """

    source: str
    labels: int
    loss: Loss
    usual: Loss | None
    excess: Excess


class PieceLoss(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a document as it was trained.

    Attributes:
        address: of the document, as `olm-data show document LOCK` takes it.
        start, stop: tokens of the document.
        usual, excess: as of its source.
    """

    step: int
    row: int
    address: str
    shard: str
    start: int
    stop: int
    epoch: int
    labels: int
    loss: Loss
    usual: Loss | None
    excess: Excess


_PIECE = (
    *("address=document", "start", "stop", "labels"),
    *("loss", "usual", "excess", "step", "row", "epoch"),
)


class StepLosses(msgspec.Struct, frozen=True, kw_only=True):
    """A step: its loss, and the sources and pieces that raised it most, first.

    Attributes:
        ranks, world_size: ranks whose pieces are there, of how many.
        not_finite: pieces whose loss is NaN or infinite; they come first.
    """

    step: int
    ranks: int
    world_size: int
    pieces: int
    labels: int
    loss: float
    not_finite: int
    sources: list[SourceLoss]
    top: list[PieceLoss]

    COLUMNS: ClassVar = {
        "sources": Columns(("source", "labels", "loss", "usual", "excess=excess nats")),
        "top": Columns(_PIECE),
    }


class DocumentLosses(msgspec.Struct, frozen=True, kw_only=True):
    """Each piece of a document in the order of the run; `usual` is its source's in those steps."""

    address: str
    pieces: list[PieceLoss]

    COLUMNS: ClassVar = {"pieces": Columns(_PIECE)}


def show_step_losses(folder: Path, step: int, most: int, source: str | None = None) -> StepLosses:
    """Return what made the loss of step `step` (from 1); `most` pieces, of one source if given.

    Raises:
        InputError: the run has no ledger.
        UsageError: the ledger has no such step, or no such source in it.
        ValidationError: a file is not one that a run writes.
    """
    usual = _usual(folder, step)
    files = [each for each in read_ledger(folder, steps=range(step, step + 1)) if each[1].num_rows]
    if not files:
        raise no_step(folder, step)
    table = pa.concat_tables([table for _, table in files]).unify_dictionaries()
    if source is not None:
        table = _of_source(table, source)
    pieces = sorted(_pieces(table, usual), key=_rank)
    finite = [piece for piece in pieces if math.isfinite(piece.loss)]
    labels = sum(piece.labels for piece in finite)
    names = sorted({piece.address.partition(":")[0] for piece in finite})
    sources = [_source(name, finite, usual.get(name)) for name in names]
    return StepLosses(
        step=step,
        ranks=len({info.rank for info, _ in files}),
        world_size=files[-1][0].world_size,
        pieces=len(pieces),
        labels=labels,
        loss=mean_loss(math.fsum(p.loss * p.labels for p in finite), labels),
        not_finite=len(pieces) - len(finite),
        sources=sorted(sources, key=lambda one: -one.excess),
        top=pieces[:most],
    )


def show_document_losses(folder: Path, address: str) -> DocumentLosses:
    """Return what the document `SOURCE:NUMBER` cost each time it was seen.

    Raises:
        InputError: the run has no ledger.
        UsageError: it is no such address, or the document was not seen.
        ValidationError: a file is not one that a run writes.
    """
    source, colon, number = address.rpartition(":")
    if not colon or not number.isdecimal():
        raise UsageError(
            f"'{printable(address)}' is not the address of a document in a mixture",
            where="--document",
            fix="write SOURCE:NUMBER, for example web:17",
        )
    check_ledger(folder)
    pieces = []
    for _, table in read_ledger(folder):
        mine = pc.equal(table["source"].cast(pa.string()), source)
        step = table["step"]
        found = table.filter(pc.and_(mine, pc.equal(table["document"], int(number))))
        if not found.num_rows:
            continue
        for each in sorted(set(found["step"].to_pylist())):
            peers = _sums(table.filter(pc.and_(mine, pc.equal(step, each))))
            usual = {source: mean_loss(*peers)}
            pieces += _pieces(found.filter(pc.equal(found["step"], each)), usual)
    if not pieces:
        raise UsageError(
            f"the ledger has no piece of '{printable(address)}'",
            where=str(folder / LEDGER),
            fix="see when it is due: olm-data show document LOCK ADDRESS --run RUN",
        )
    pieces.sort(key=lambda piece: (piece.step, piece.row, piece.start))
    return DocumentLosses(address=address, pieces=pieces)


def check_ledger(folder: Path) -> None:
    """Raise InputError where a run has no ledger."""
    if not ledger_files(folder):
        raise InputError(
            "the run has no loss ledger",
            where=str(folder / LEDGER),
            fix="train with trainer.callbacks.loss_ledger: {} to have one",
        )


def _usual(folder: Path, step: int) -> dict[str, float]:
    """Return the mean loss of each source in the steps before `step`."""
    check_ledger(folder)
    names: list[str] = []
    sums: Sums = {}
    for _, table in read_ledger(folder, steps=range(step - BEFORE, step)):
        finite = table.filter(pc.is_finite(table["nats"]))
        nats, labels = (finite[name].to_numpy() for name in ("nats", "tokens"))
        _add(sums, (source_numbers(finite["source"], names),), nats, labels)
    return {names[number]: mean_loss(*each) for (number,), each in sums.items() if each[1]}


def _of_source(table: pa.Table, source: str) -> pa.Table:
    names = pc.unique(table["source"].cast(pa.string())).to_pylist()
    if source not in names:
        raise UsageError(f"the step has no source {source!r}", fix=suggest(source, names))
    return table.filter(pc.equal(table["source"].cast(pa.string()), source))


_SAME = ("step", "row", "shard", "start", "stop", "epoch")
"""Fields of a piece that are columns of the ledger."""


def _pieces(table: pa.Table, usual: dict[str, float]) -> list[PieceLoss]:
    found = []
    for line in table.to_pylist():
        mean, labels = usual.get(line["source"]), line["tokens"]
        found.append(
            PieceLoss(
                **{name: line[name] for name in _SAME},
                address=f"{line['source']}:{line['document']}",
                labels=labels,
                loss=line["nats"] / labels,
                usual=mean,
                excess=line["nats"] - (mean or 0.0) * labels,
            )
        )
    return found


def _rank(piece: PieceLoss) -> tuple[bool, float]:
    """Order pieces by what they add, those that are not finite first."""
    finite = math.isfinite(piece.loss)
    return finite, -piece.excess if finite else 0.0


def _source(name: str, pieces: Sequence[PieceLoss], usual: float | None) -> SourceLoss:
    mine = [piece for piece in pieces if piece.address.partition(":")[0] == name]
    labels = sum(piece.labels for piece in mine)
    return SourceLoss(
        source=name,
        labels=labels,
        loss=mean_loss(math.fsum(piece.loss * piece.labels for piece in mine), labels),
        usual=usual,
        excess=math.fsum(piece.excess for piece in mine),
    )


def _sums(table: pa.Table) -> tuple[float, int]:
    """Return nats and labels of the pieces that have a finite loss."""
    table = table.filter(pc.is_finite(table["nats"]))
    return pc.sum(table["nats"]).as_py() or 0.0, pc.sum(table["tokens"]).as_py() or 0


def mean_loss(nats: float, labels: int) -> float:
    """Return nats a label; NaN without labels."""
    return nats / labels if labels else math.nan


def no_step(folder: Path, step: int) -> UsageError:
    """Return the error for a step that is not in a ledger."""
    return UsageError(
        f"the ledger has no step {step:,}",
        where=str(folder / LEDGER),
        fix="olm-data show ledger RUN says which it has",
    )


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


LEARNED = (
    *("address=document", "epochs", "labels", "first", "second", "last"),
    *("above=above source", "drop"),
)


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

    COLUMNS: ClassVar = {"never_learned": Columns(LEARNED), "memorised": Columns(LEARNED)}


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
        wanted = names.index(source) if source in names else -1
        kept = slice(None) if source is None else number == wanted
        step, document, start, epoch, labels, nats = (
            finite[name].to_numpy()[kept] for name in _ADDED if name != "source"
        )
        number, period = number[kept], (step - first) // width
        _add(by_source, (number, period), nats, labels)
        place = np.searchsorted(POSITION_EDGES, start, side="right")
        _add(by_position, (place, period), nats, labels)
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
    return np.array([names.index(name) for name in own])[encoded.indices.to_numpy()]


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
