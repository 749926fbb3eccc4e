"""A report is one self-contained page, of a mixture alone or with runs of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support.command import inside
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
    assert "olm-data" not in text


def test_a_folder_that_is_no_run_is_refused(lock: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        write_report(str(lock), [str(tmp_path)], str(tmp_path / "r.html"), say=print)
    assert not (tmp_path / "r.html").exists()


def test_runs_are_in_it_as_a_page_that_watches_them_shows_them(
    lock: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    start = {"step": 0, "rewound": 0, "lock": "f" * 64, "global_batch_size": 64, "world_size": 1}
    start |= {"skip": [], "command": "torchrun a.yaml", "parameters": 1_600_000, "device": "cpu"}
    (other / "starts.jsonl").write_text(json.dumps(start) + "\n")
    output = tmp_path / "r.html"
    done = inside(capsys, "report", lock, "--run", run, "--run", other, "--output", output)
    assert done.returncode == 0, done.stderr
    assert "another lock" in done.stderr
    (data,) = re.findall('id="olm-data">(.*?)</script>', output.read_text(), re.DOTALL)
    one, two = json.loads(data)["runs"]
    assert (one["name"], two["name"]) == ("run", "other")
    assert one["words"]["sample"]["text"] == "(x): return x & 1"
    assert ["loss on a", "5.250"] in one["words"]["facts"]
    assert {"parameters": "1.6 M", "device": "1 x cpu"}.items() <= dict(
        two["words"]["facts"]
    ).items()
    assert two["words"]["started"] == "torchrun a.yaml"
    assert any("f" * 12 in note for note in two["words"]["notes"])
