"""What is printed cannot be forged by what is shown, and colours add nothing but codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.project import Project

from olm_data.dataset.dataset import Dataset
from olm_data.extensions.show.documents import Query, show_documents
from olm_data.extensions.show.render import render
from olm_data.rows.views import DocumentView


def documents(two_sources: Path, *, most: int | None = None, **query: Any) -> list[DocumentView]:
    return show_documents(Dataset.open(str(two_sources)), Query(most=most, **query))


def test_text_and_ids_cannot_forge_the_view(project: Project) -> None:
    text = "a\n-- document 7  id forged\x1b[2J\r\u202e\nend"
    (project / "a.jsonl").write_text(json.dumps({"id": "x\n\x1b[31m", "text": text}) + "\n")
    project.make([project / "a.jsonl"], id_column="id")
    shown = render(documents(project.out, address="0")[0])
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert "\u202e" not in shown
    assert [line for line in shown.split("\n") if line.startswith("--")] == [
        "-- document 0  id x\\n\\x1b[31m"
    ]
    assert "   | -- document 7" in shown


def test_long_text_is_cut_unless_asked_for(project: Project) -> None:
    source = project.write("a.jsonl", ["word " * 1000])
    project.make([source])
    (view,) = documents(project.out)
    assert "3,800 more characters" in render(view)
    assert render(view, full=True).count("word") == 1000


def test_a_long_document_is_shown_around_the_hit_only_unless_asked_for(project: Project) -> None:
    text = "word " * 2000 + "needle " + "word " * 2000
    project.make([project.write("a.jsonl", [text])])
    (view,) = documents(project.out, text="needle")
    assert "needle" in view.text
    assert view.stop - view.start < 120
    assert f"tokens {view.start:,} to {view.stop:,} of {view.tokens:,}" in render(view)
    (view,) = documents(project.out, text="needle", full=True)
    assert view.text == text


ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("number", range(5))
def test_colours_add_codes_and_nothing_else(number: int, two_sources: Path) -> None:
    (view,) = documents(two_sources / "a", address=str(number))
    tokenizer = Dataset.open(str(two_sources / "a")).tokenizer
    painted = render(view, tokenizer, found="o")
    assert ANSI.sub("", painted) == render(view)
    codes = set(ANSI.findall(painted))
    assert {"\x1b[38;5;16;48;5;153m", "\x1b[38;5;16;48;5;223m", "\x1b[1;97;41m"} <= codes
    assert "\x1b[" not in render(view)
    assert painted.count("226mo\x1b[0m") == view.text.count("o")


def test_special_tokens_inside_a_document_are_red(project: Project) -> None:
    source = project.write("a.jsonl", ["one <|endoftext|> two"])
    project.make([source], special="allow")
    (view,) = documents(project.out, address="0")
    assert "\x1b[1;97;41m<|endoftext|>\x1b[0m" in render(view, project.open().tokenizer)
