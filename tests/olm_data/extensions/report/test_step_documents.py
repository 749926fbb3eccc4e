"""What a page shows of a step is harmless, and leaves out the rows that the step left out."""

from __future__ import annotations

from pathlib import Path

from olm_data.errors import printable
from olm_data.extensions.report.step_documents import step_documents
from olm_data.mixture.lock import Lock
from olm_data.rows.views import LockRows
from olm_data.run_log.log import Step


def test_rows_that_were_skipped_are_not_those_of_the_step(lock: Path) -> None:
    step = Step(
        step=2, tokens=96, rows=(4, 9), skipped=((5, 7),), metrics={"optim/step skipped": 1.0}
    )
    found = step_documents(LockRows(Lock.read(lock)), step, most_rows=2, most_text=5)
    assert ([row.row for row in found.rows], found.rows_of_step) == ([4, 7], 3)
    assert found.state == "not taken"
    assert sum(rows for *_, rows in found.sources) == 3
    for row in found.rows:
        pieces = LockRows(Lock.read(lock)).view(row.row).pieces
        assert [piece.text for piece in row.pieces] == [
            "\n".join(map(printable, piece.text[:5].split("\n"))) for piece in pieces
        ]
