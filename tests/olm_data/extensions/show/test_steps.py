"""A part of a step is shown without reading the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from olm_data.extensions.show.documents import Query, show_sightings
from olm_data.extensions.show.steps import Batches, show_step
from olm_data.mixture.lock import Lock
from olm_data.order.steps import StepSizes
from olm_data.rows.views import LockRows

S = 64


def test_a_part_of_a_step_reads_only_its_rows(lock_of: Callable[[str], Path]) -> None:
    lock = Lock.read(lock_of("concat"))
    view = show_step(Batches(LockRows(lock), batch_sizes=StepSizes.constant(8 * S)), 2, most=3)
    assert [row.row for row in view.rows] == [8, 9, 10]
    assert view.rows_of_step == 8


# Whatever a row shows, the document's sightings name it.
@pytest.mark.parametrize("packing", ["concat", "best_fit", "document"])
def test_a_document_is_seen_by_the_rows_that_hold_it_and_no_other(
    lock_of: Callable[[str], Path], packing: str
) -> None:
    lock = Lock.read(lock_of(packing))
    rows = LockRows(lock)
    expected: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for number in range(lock.total_rows):
        view, place = rows.view(number), 0
        for piece in view.pieces:
            if place < S:  # what stands behind the inputs is a label
                key = (str(view.source), piece.document)
                expected.setdefault(key, []).append((number, piece.start, piece.stop))
            place += piece.stop - piece.start
    seen = 0
    for index, source in enumerate(lock.sources):
        for document in range(0, rows.source(index)[0].documents, 3):
            (found,) = show_sightings(rows, Query(address=f"{source.name}:{document}"))
            assert [(s.row, s.start, s.stop) for s in found.sightings] == expected.get(
                (source.name, document), []
            )
            seen += len(found.sightings)
    assert seen > 100


def test_rows_that_no_step_has_are_said_to_be_skipped_or_left_over(
    lock_of: Callable[[str], Path],
) -> None:
    lock = Lock.read(lock_of("concat"))
    size = lock.total_rows - 1
    batches = Batches(LockRows(lock), batch_sizes=StepSizes.constant(size // 2 * S), skip=[(0, 1)])
    rest = lock.total_rows - 1 - size // 2 * 2
    rows = LockRows(lock)
    states = set()
    for number in (0, lock.total_rows - 1):
        view = rows.view(number)
        (found,) = show_sightings(
            rows, Query(address=f"{view.source}:{view.pieces[0].document}"), batches
        )
        at = [s.row for s in found.sightings].index(number)
        states.add(found.sightings[at].state)
        assert (found.sightings[at].step is None) == (number == 0 or rest > 0)
    assert "skipped" in states
