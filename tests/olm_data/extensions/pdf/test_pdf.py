"""A PDF is the text of its pages, and one that is damaged is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.corpora import pdf
from support.inputs import write
from support.project import Project
from support.reading import read_source
from support.tokenizing import tokenized

pypdf = pytest.importorskip("pypdf", reason="the extra pdf is not installed")


def test_pages_are_joined_and_their_places_kept(project: Project) -> None:
    path = write(project / "a.pdf", pdf(["first page", "second", ""]))
    read = read_source(str(path), keep=["pages", "page_starts"])
    assert (read.texts, read.ids) == (["first page\n\nsecond\n\n"], ["a.pdf"])
    assert read.kept == [{"pages": 3, "page_starts": "[0,12,20]"}]
    made = project.make([path])
    assert tokenized(made).libraries == (f"pypdf {pypdf.__version__}",)


def test_what_is_broken_is_dropped_or_marked_and_always_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.pdf", pdf(["one", "two", "three"]))
    write(tmp_path / "b.pdf", b"%PDF-1.7 and no more")
    write(tmp_path / "c.pdf", pdf(["", ""]))
    read = read_source(str(tmp_path))
    assert read.texts == ["one\n\ntwo\n\nthree"]
    assert read.reasons == [("malformed", 0), ("empty", 0)]
    extract = pypdf.PageObject.extract_text

    def failing(page: pypdf.PageObject) -> str:
        text = str(extract(page))
        if text == "two":
            raise KeyError("/Font")
        return text

    monkeypatch.setattr(pypdf.PageObject, "extract_text", failing)
    broken = read_source(str(tmp_path / "a.pdf"))
    assert broken.texts == []
    assert broken.drops[0].detail.startswith("page 2: KeyError")
    assert broken.drops[0].raw == (tmp_path / "a.pdf").read_bytes()
    mended = read_source(str(tmp_path / "a.pdf"), on_invalid="replace")
    assert mended.texts == ["one\n\n\ufffd\n\nthree"]
