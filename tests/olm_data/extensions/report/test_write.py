"""A report is one self-contained page, of a mixture alone or with runs of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.html_page import HtmlPage

from olm_data.errors import InputError
from olm_data.extensions.report.write import write_report


def test_each_picture_says_in_words_what_it_shows(lock: Path, run: Path, tmp_path: Path) -> None:
    text = write_report(str(lock), [str(run)], str(tmp_path / "r.html"), say=print).read_text()
    pictures = re.findall("<svg[^>]*>", text)
    assert len(pictures) >= 3
    assert all('role="img" aria-label="' in picture for picture in pictures)


def test_report_fetches_nothing(lock: Path, run: Path, tmp_path: Path) -> None:
    page = HtmlPage(
        write_report(str(lock), [str(run)], str(tmp_path / "r.html"), say=print).read_text()
    )
    assert page.fetched == []


def test_report_without_a_run_shows_the_mixture_alone(lock: Path, tmp_path: Path) -> None:
    text = write_report(str(lock), [], str(tmp_path / "r.html"), say=print).read_text()
    assert "Document lengths" in text
    assert "Throughput" not in text


def test_a_folder_that_is_no_run_is_refused(lock: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        write_report(str(lock), [str(tmp_path)], str(tmp_path / "r.html"), say=print)
    assert not (tmp_path / "r.html").exists()
