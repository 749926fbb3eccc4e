"""What the loss ledger says, as lines for people."""

from __future__ import annotations

from collections.abc import Sequence

from olm_data.show.ledger import DocumentLosses, PieceLoss, StepLosses
from olm_data.show.ledger_summary import Curve, LearnedDocument, LedgerSummary
from olm_data.tables import aligned

_PIECE = ("document", "tokens", "labels", "loss", "usual", "excess", "step", "row", "epoch")


def step_text(view: StepLosses) -> list[str]:
    """Return a step: its sources, then the pieces that raised it most."""
    lines = [
        f"step {view.step:,}: loss {view.loss:.4f} over {view.labels:,} labels in {view.pieces:,} "
        "pieces of documents"
    ]
    if view.ranks < view.world_size:
        lines.append(f"note: of {view.world_size:,} ranks the ledger has {view.ranks:,}")
    if view.not_finite:
        lines.append(f"note: {view.not_finite:,} pieces have a loss that is not finite")
    rows = [
        (one.source, f"{one.labels:,}", f"{one.loss:.4f}", _number(one.usual), f"{one.excess:+.1f}")
        for one in view.sources
    ]
    lines += ["", *aligned([("source", "labels", "loss", "usual", "excess nats"), *rows])]
    return [*lines, "", *_pieces(view.top)]


def document_text(view: DocumentLosses) -> list[str]:
    """Return what a document cost each time it was seen; usual: its source in that step."""
    return [f"{view.address}: seen in {len(view.pieces):,} pieces", "", *_pieces(view.pieces)]


def summary_text(view: LedgerSummary) -> list[str]:
    """Return curves by source and by position, then documents by what was learned of them."""
    lines = [
        f"steps {view.first:,} to {view.last:,}: {view.pieces:,} pieces of documents, "
        f"{view.labels:,} labels"
    ]
    if view.missing:
        lines.append(f"note: {view.missing:,} of these steps are not in the ledger")
    if view.not_finite:
        lines.append(f"note: {view.not_finite:,} pieces have a loss that is not finite")
    until = [f"..{step:,}" for step in view.until]
    lines += ["", *_curves(["source", "labels", *until], view.sources)]
    lines += ["", *_curves(["position", "labels", *until], view.positions)]
    if not view.repeated:
        return [*lines, "", "no document was seen in two epochs yet"]
    lines += ["", f"{view.repeated:,} documents were seen in two epochs or more; never learned:"]
    lines += _learned(view.never_learned)
    return [*lines, "", "memorised at the second epoch:", *_learned(view.memorised)]


def _pieces(pieces: Sequence[PieceLoss]) -> list[str]:
    rows = [
        (
            one.address,
            f"{one.start:,} to {one.stop:,}",
            f"{one.labels:,}",
            f"{one.loss:.4f}",
            _number(one.usual),
            f"{one.excess:+.1f}",
            f"{one.step:,}",
            f"{one.row:,}",
            f"{one.epoch:,}",
        )
        for one in pieces
    ]
    return aligned([_PIECE, *rows])


def _curves(head: Sequence[str], curves: Sequence[Curve]) -> list[str]:
    rows = [(one.name, f"{one.labels:,}", *map(_number, one.losses)) for one in curves]
    return aligned([tuple(head), *rows])


def _learned(documents: Sequence[LearnedDocument]) -> list[str]:
    head = ("document", "epochs", "labels", "first", "second", "last", "above source", "drop")
    rows = [
        (
            one.address,
            f"{one.epochs:,}",
            f"{one.labels:,}",
            f"{one.first:.4f}",
            f"{one.second:.4f}",
            f"{one.last:.4f}",
            f"{one.above:+.4f}",
            f"{one.drop:+.4f}",
        )
        for one in documents
    ]
    return aligned([head, *rows])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
