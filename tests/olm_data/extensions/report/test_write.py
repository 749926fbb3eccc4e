"""The report of a mixture, written as one page."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command import Olm
from support.html_page import HtmlPage
from support.ledgers import write_ledger

from olm_data.errors import InputError
from olm_data.extensions.report.mixture import spread
from olm_data.extensions.report.write import length_section, write_report
from olm_data.mixture.lock import Lock
from olm_data.mixture.summary import tree
from olm_data.rows.views import LockRows


def test_each_picture_says_in_words_what_it_shows(whole: str) -> None:
    pictures = re.findall("<svg[^>]*>", whole)
    assert len(pictures) >= 3
    assert all('role="img" aria-label="' in picture for picture in pictures)


def test_report_fetches_nothing(whole: str) -> None:
    assert HtmlPage(whole).fetched == []


def test_report_without_a_run_shows_the_mixture_alone(alone: str) -> None:
    assert "Document lengths" in alone
    assert "olm-data" not in alone


def test_a_folder_that_is_no_run_is_refused(lock: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        write_report(str(lock), [str(tmp_path)], str(tmp_path / "r.html"), say=print)
    assert not (tmp_path / "r.html").exists()


def test_runs_are_in_it_as_a_page_that_watches_them_shows_them(
    lock: Path, run: Path, tmp_path: Path, olm: Olm
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    start = {"step": 0, "rewound": 0, "lock": "f" * 64, "global_batch_size": 64, "world_size": 1}
    start |= {"skip": [], "command": "torchrun a.yaml", "parameters": 1_600_000, "device": "cpu"}
    (other / "starts.jsonl").write_text(json.dumps(start) + "\n")
    output = tmp_path / "r.html"
    done = olm("report", lock, "--run", run, "--run", other, "--output", output)
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


# A report shows how long the documents of each source are.
def test_the_table_has_the_lengths_of_each_source(lock: Path) -> None:
    mixture = Lock.read(lock)
    datasets = mixture.open_datasets()
    cells = HtmlPage(length_section(mixture, datasets)).text
    for source, dataset in zip(mixture.sources, datasets, strict=True):
        lengths = np.array([len(document.tokens) for document in dataset])
        at = cells.index(source.name, cells.index("longer than a row"))
        assert cells[at + 1 : at + 8] == [
            f"{len(lengths):,}",
            f"{lengths.mean():,.0f}",
            *(f"{np.percentile(lengths, share):,.0f}" for share in (10, 50, 90)),
            f"{lengths.max():,}",
            f"{100 * np.mean(lengths > mixture.sequence_length):.1f} %",
        ]


# A report of a run with a ledger has its curves and documents; of one without, nothing of it.
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


# A report shows rows of the run, evenly spread.
def test_report_shows_rows_of_the_run_with_the_borders_of_their_documents(
    lock: Path, alone: str
) -> None:
    total = Lock.read(lock).total_rows
    for number in ((2 * i + 1) * total // 12 for i in range(6)):
        row = LockRows(Lock.read(lock)).view(number)
        assert f"<h3>row {number}: stage {row.stage}, source {row.source}, epoch" in alone
        for piece in row.pieces:
            name = piece.id or f"document {piece.document}"
            assert f'title="{name}: {piece.stop - piece.start} tokens"' in alone
    assert "&lt;b&gt;" in alone  # what a document holds is text, never markup
    assert "<b> " not in alone


@given(st.integers(0, 10**15), st.integers(1, 300))
def test_sampled_rows_are_different_and_in_the_run(total: int, most: int) -> None:
    rows = spread(total, most).tolist()
    assert (len(rows), rows) == (min(total, most), sorted(set(rows)))
    assert all(0 <= row < total for row in rows)


def test_report_shows_stages_epochs_and_packing_as_the_lock_has_them(
    lock: Path, alone: str
) -> None:
    planned, cells = Lock.read(lock), set(HtmlPage(alone).text)
    for stage in planned.stages:
        assert {stage.name, f"{stage.rows:,}"} <= cells
    for i, source in enumerate(planned.sources):
        rows = sum(stage.rows_by_source[i] for stage in planned.stages)
        assert {f"{rows / source.rows:.4f}", f"{rows * 16:,}", f"{source.rows:,}"} <= cells
        assert f"{1 - source.plan.tokens / (source.rows * 16):.4%}" in cells
    assert {"8", "2"} <= cells  # max_epochs
    main, anneal = tree(planned)
    group = main.members[0]
    assert (group.name, group.members[0].name) == ("both", "a")
    for node in (*main.members, *group.members, *anneal.members):
        assert {node.name, f"{node.rows * 16:,}"} <= cells
        for share in (node.share_wanted, node.share_compiled, node.share_got):
            assert f"{100 * share:.3f} %" in cells
