"""A function of one's own keeps records or leaves them out, counted by its reasons."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.adding import add_to
from support.inline_runner import InlineRunner
from support.inputs import lines, write
from support.project import Project
from support.reading import read_source
from support.tokenizing import digests, make_dataset

from olm_data.errors import ConflictError, InputError, OlmError, UsageError, ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.runners.local import LocalRunner
from olm_data.sources import own_filter
from olm_data.tokenization.stored_job import load_job

KEEP = """
def keep(record):
    if len(record["text"].split()) < 4:
        return "too short"
    if record["id"] == "7":
        return "seven"
    return record["score"] is not None and record["score"] > 2

def numbers(record): return 3
def many(record): return "reason " + record["id"]
def fails(record): return record["nothing"]
constant = 3
"""
ROWS = [
    {"id": str(n), "text": "word " * (n % 9), "score": None if n % 5 == 0 else n % 4}
    for n in range(1, 400)
]
EXPECTED = Counter(
    "empty"
    if row["id"] and int(row["id"]) % 9 == 0
    else "rejected: too short"
    if int(row["id"]) % 9 < 4
    else "rejected: seven"
    if row["id"] == "7"
    else "rejected"
    if row["score"] is None or row["score"] <= 2
    else "kept"
    for row in ROWS
)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module `filter_lab` that is importable here and in workers."""
    folder = tmp_path / "lab"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    monkeypatch.delitem(__import__("sys").modules, "filter_lab", raising=False)
    return write(folder / "filter_lab.py", KEEP.encode())


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl", lines(ROWS))


def test_what_it_leaves_out_is_counted_by_reason_after_the_condition(lab: Path, rows: Path) -> None:
    read = read_source(str(rows), filter="filter_lab:keep", keep=["score"])
    found = Counter({"kept": len(read.texts), "empty": len(read.drops)}) + read.skipped
    assert found == EXPECTED
    both = read_source(str(rows), filter="filter_lab:keep", keep=["score"], where="score >= 3")
    assert both.texts == read.texts
    assert "rejected" not in both.skipped
    assert (both.skipped + Counter()).keys() == {
        "filtered",
        "rejected: too short",
        "rejected: seven",
    }


def made(rows: Path, tokenizer: Path, output: Path, runner: Any = None) -> Any:
    options = {"filter": "filter_lab:keep", "keep": ("score",), "shard_tokens": 100}
    return make_dataset([rows], tokenizer, output, runner=runner or InlineRunner(), **options)


def test_workers_apply_it_and_a_run_goes_on_with_the_same_source_only(
    lab: Path, rows: Path, project: Project
) -> None:
    whole = made(rows, project.tokenizer, project / "whole")
    assert Counter(whole.manifest.dropped, kept=whole.manifest.totals.documents) == EXPECTED
    assert verify(str(project / "whole")).ok
    made(rows, project.tokenizer, project / "two", LocalRunner(2))
    assert digests(project / "two") == digests(project / "whole")
    (project / "two" / "manifest.json").unlink()
    with pytest.raises(InputError, match="somebody's own: filter_lab:keep"):
        load_job(str(project / "two"))
    job = load_job(str(project / "two"), trust=True)
    assert job.own_parts
    lab.write_text(KEEP.replace("> 2", "> 1"))
    with pytest.raises(ConflictError, match=r"filter: .*filter_lab:keep"):
        made(rows, project.tokenizer, project / "two")
    for name in project.folder.glob("two/shard-00000*"):
        name.unlink()
    own_filter._function.cache_clear()
    with pytest.raises(ValidationError, match="another source here"):
        job.run(0, lambda **counts: None)


def test_an_addition_names_it_again(lab: Path, rows: Path, project: Project) -> None:
    made(rows, project.tokenizer, project.out)
    more = write(project / "more.jsonl", lines([*ROWS[:50], {"id": "x", "text": "a b c d e"}]))
    with pytest.raises(UsageError, match="made with the filter filter_lab:keep") as raised:
        add_to(project.out, more)
    assert raised.value.fix == "--filter filter_lab:keep"
    before = project.open().documents
    after = add_to(project.out, more, filter="filter_lab:keep").manifest.totals.documents
    assert after - before == sum(row["id"] != "7" for row in ROWS[:50] if row_is_kept(row))


def row_is_kept(row: dict[str, Any]) -> bool:
    return int(row["id"]) % 9 >= 4 and (row["score"] or 0) > 2


@pytest.mark.parametrize(
    ("path", "error", "said"),
    [
        ("filter_lab:numbers", InputError, "the filter filter_lab:numbers returns 3"),
        ("filter_lab:many", InputError, "more than 100 reasons"),
        ("filter_lab:fails", InputError, "fails: KeyError: 'nothing'"),
        ("filter_lab:constant", UsageError, "filter_lab:constant is no function"),
        ("filter_lab:kep", UsageError, "has no function kep"),
        ("math:sqrt", UsageError, "no source in Python"),
    ],
)
def test_what_is_wrong_with_it_is_said(
    path: str, error: type[OlmError], said: str, lab: Path, rows: Path
) -> None:
    with pytest.raises(error, match=said):
        read_source(str(rows), filter=path)
