"""Pages and archives of the web become the main text of their pages; all else is counted."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from support.corpora import page, record, response
from support.inline_runner import InlineRunner
from support.inputs import write
from support.project import Project
from support.reading import read_source
from support.tokenizing import digests, tokenized

from olm_data.errors import ConflictError, InputError
from olm_data.sources import readers

pytest.importorskip("resiliparse", reason="the extra html is not installed")
TEXT = "Main text \u00e9 of a page, and a bit more of it."


@pytest.mark.parametrize("charset", ["utf-8", "windows-1252", "utf-16"])
def test_a_page_is_its_main_text_in_its_charset(charset: str, tmp_path: Path) -> None:
    html = page(TEXT)
    if charset == "windows-1252":
        html = html.replace("<head>", f'<head><meta charset="{charset}">')
    write(tmp_path / "a.html", html.encode(charset))
    write(tmp_path / "b.htm.gz", gzip.compress(page("Other text here.").encode()))
    read = read_source(str(tmp_path), keep=["title"])
    assert read.texts == [f"A title\n\n{TEXT}", "A title\n\nOther text here."]
    assert (read.ids, read.kept) == (["a.html", "b.htm.gz"], [{"title": "A title"}] * 2)


def test_bad_bytes_go_the_way_of_text_that_is_not_utf8(tmp_path: Path) -> None:
    head = '<head><meta charset="utf-8">'
    bad = page("bad X byte").replace("<head>", head).encode().replace(b"X", b"\xff")
    write(tmp_path / "a.html", bad)
    hidden = page("good text").replace("<head>", head).encode().replace(b"no()", b"\xff")
    write(tmp_path / "b.html", hidden)
    write(tmp_path / "c.html", b"<div>" * 600 + b"deep")
    read = read_source(str(tmp_path))
    assert read.texts == ["A title\n\ngood text"]
    assert read.reasons == [("invalid_utf8", 0), ("malformed", 0)]
    assert "nested more than 512 deep" in read.drops[1].detail
    mended = read_source(str(tmp_path), on_invalid="replace")
    assert mended.texts[0] == "A title\n\nbad \ufffd byte"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of 40 pages, and records between them that are none."""
    pytest.importorskip("fastwarc", reason="the extra warc is not installed")
    parts = [record(b"software: x\r\n", 900, kind="warcinfo", http=False)]
    for n in range(40):
        parts.append(record(b"GET / HTTP/1.1\r\n\r\n", 1000 + n, kind="request"))
        parts.append(response(page(f"Page number {n} says more.", f"T{n}").encode(), n))
    parts.append(response(b"\x89PNG", 901, "image/png"))
    parts.append(response(b"<div>" * 600, 902))
    return write(tmp_path / "crawl.warc.gz", b"".join(map(gzip.compress, parts)))


def test_an_archive_gives_its_pages_and_counts_all_else(archive: Path) -> None:
    read = read_source(str(archive), keep=["url", "date", "title"])
    assert read.texts == [f"T{n}\n\nPage number {n} says more." for n in range(40)]
    assert read.ids[3] == "<urn:uuid:3>"
    assert read.kept[3] == {
        "url": "http://a.example/3",
        "date": "2026-01-02T03:04:05+00:00",
        "title": "T3",
    }
    assert (read.skipped, read.reasons) == ({"no_html": 42}, [("malformed", 82)])


def test_a_limit_counts_nothing_behind_it(archive: Path, project: Project) -> None:
    made = project.make([archive], limit=5)
    assert (made.manifest.totals.documents, made.manifest.dropped) == (5, {"no_html": 6})


def test_a_damaged_archive_is_refused_or_its_record_dropped(tmp_path: Path) -> None:
    pytest.importorskip("fastwarc", reason="the extra warc is not installed")
    good = response(page("One page here.").encode(), 1)
    noise = write(tmp_path / "a.warc", good + b"noise between\r\n" + good)
    with pytest.raises(InputError, match="Invalid WARC header"):
        read_source(str(noise))
    cut = write(tmp_path / "b.warc", good + good[:-50])
    assert read_source(str(cut)).reasons == [("malformed", 1)]
    bad = write(tmp_path / "c.warc", record(b"no answer", 1) + good)
    assert read_source(str(bad)).skipped == {"no_html": 1}


def test_a_run_over_an_archive_goes_on_with_the_same_versions_alone(
    archive: Path, monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    pages = [write(project / f"{n}.html", page(f"File {n}").encode()) for n in range(5)]
    options: dict[str, Any] = {"shard_tokens": 100, "max_bad": "5"}
    made = project.make([archive, *pages], "a", **options)
    assert made.manifest.totals.documents == 45
    names = [library.split()[0] for library in tokenized(made).libraries]
    assert names == ["fastwarc", "resiliparse"]
    project.make([archive, *pages], "b", **options)
    (project / "b" / "manifest.json").unlink()
    for name in (project / "b").glob("shard-00000*"):
        name.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(readers, "version", lambda name: "99")
        with pytest.raises(ConflictError, match=r"libraries: .*resiliparse 99"):
            project.make([archive, *pages], "b", **options)
    project.make([archive, *pages], "b", runner=InlineRunner(), **options)
    assert digests(project / "b") == digests(project / "a")
