"""A report of a run with a ledger has its curves and documents; of one without, nothing of it."""

from __future__ import annotations

from pathlib import Path

from support.html_page import HtmlPage
from support.ledgers import write_ledger

from olm_data.extensions.report.write import write_report


def test_the_page_shows_curves_and_documents(lock: Path, run: Path, tmp_path: Path) -> None:
    def words() -> str:
        page = write_report(str(lock), [str(run)], str(tmp_path / "r.html"), say=print)
        return " ".join(HtmlPage(page.read_text()).text)

    assert "Loss by document" not in words()
    pieces = [("web", n, 0, 0, 10, 4.0) for n in range(3)]
    again = [("web", n, 200, 1, 10, 1.0 + n) for n in range(3)]
    write_ledger(run, {1: pieces, 2: again, 5: again})
    text = words()
    for part in ("Loss by document of run", "web:2", "2 steps are not in the ledger"):
        assert part in text
    assert "3 documents were seen in two epochs or more" in text
