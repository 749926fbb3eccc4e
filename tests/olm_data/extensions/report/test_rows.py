"""A report shows rows of the run, evenly spread."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from olm_data.extensions.report.mixture import spread
from olm_data.extensions.report.write import write_report
from olm_data.mixture.lock import Lock
from olm_data.rows.views import LockRows


def test_report_shows_rows_of_the_run_with_the_borders_of_their_documents(
    lock: Path, tmp_path: Path
) -> None:
    text = write_report(str(lock), [], str(tmp_path / "r.html"), say=print).read_text()
    total = Lock.read(lock).total_rows
    for number in ((2 * i + 1) * total // 12 for i in range(6)):
        row = LockRows(Lock.read(lock)).view(number)
        assert f"<h3>row {number}: stage {row.stage}, source {row.source}, epoch" in text
        for piece in row.pieces:
            name = piece.id or f"document {piece.document}"
            assert f'title="{name}: {piece.stop - piece.start} tokens"' in text
    assert "&lt;b&gt;" in text  # what a document holds is text, never markup
    assert "<b> " not in text


@given(st.integers(0, 10**15), st.integers(1, 300))
def test_sampled_rows_are_different_and_in_the_run(total: int, most: int) -> None:
    rows = spread(total, most).tolist()
    assert len(rows) == min(total, most)
    assert rows == sorted(set(rows))
    assert all(0 <= row < total for row in rows)
