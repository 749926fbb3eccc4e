"""Rows of a table or query of SQLite are records, in one order."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from support.inline_runner import InlineRunner
from support.reading import read_source
from support.tokenizing import digests, make_request

from olm_data.errors import InputError
from olm_data.progress import Progress
from olm_data.tokenization.tokenize import tokenize

BODY: dict[str, Any] = {"text_column": "body", "max_bad": "1"}


@pytest.fixture
def database(tmp_path: Path) -> str:
    path = tmp_path / "corpus.db"
    with sqlite3.connect(path) as made:
        made.execute('CREATE TABLE "my articles" (id TEXT, body TEXT, score REAL)')
        rows = [(f"a{n}", f"text of row {n}", n / 2) for n in range(600)]
        made.executemany('INSERT INTO "my articles" VALUES (?, ?, ?)', [*rows, ("x", None, 1.0)])
    return str(path)


def test_a_table_is_read_in_order_with_its_columns(database: str) -> None:
    read = read_source(source="sqlite", root=database, text_column="body", keep=["score"])
    assert read.texts == [f"text of row {n}" for n in range(600)]
    assert (read.kept[5], read.ids[7]) == ({"score": 2.5}, "a7")
    assert read.reasons == [("no_text", 600)]
    query = 'SELECT id, body AS text FROM "my articles" WHERE score > 295 ORDER BY score DESC'
    asked = read_source(source="sqlite", root=database, subset=query)
    assert asked.ids == [f"a{n}" for n in range(599, 590, -1)]


@pytest.mark.parametrize(
    ("subset", "said"),
    [("my article", "there is no table my article"), ("DROP TABLE x", "there is no table DROP")],
)
def test_another_table_and_other_statements_are_refused(
    database: str, subset: str, said: str
) -> None:
    with pytest.raises(InputError, match=said) as raised:
        read_source(source="sqlite", root=database, subset=subset, text_column="body")
    assert "my articles" in str(raised.value)


def test_nothing_is_written_to_it(database: str) -> None:
    query = 'WITH x AS (SELECT 1) DELETE FROM "my articles"'
    with pytest.raises(InputError, match="readonly"):
        read_source(source="sqlite", root=database, subset=query, text_column="body")


def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(
    database: str, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    def made(output: Path) -> None:
        request = make_request(
            [], tiny_tokenizer, str(output), source="sqlite", root=database, **BODY
        )
        tokenize(request, runner=InlineRunner(), progress=Progress("tokenize"))

    made(tmp_path / "a")
    made(tmp_path / "b")
    (tmp_path / "b" / "manifest.json").unlink()
    for name in (tmp_path / "b").glob("shard-00000*"):
        name.unlink()
    made(tmp_path / "b")
    assert digests(tmp_path / "b") == digests(tmp_path / "a")
