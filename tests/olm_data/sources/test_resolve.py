"""From a command line to a source: what goes together, which names are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.reading import resolve_source

from olm_data.errors import OlmError, UsageError
from olm_data.tokenizer.tokenizer import load_tokenizer


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(
        "".join(json.dumps({"text": f"t{k}", **row}) + "\n" for k, row in enumerate(rows))
    )
    return path


@pytest.mark.parametrize("name", ["id", "input", "position", "text_bytes", "content_hash"])
def test_the_names_of_docs_parquet_are_refused_before_work(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.jsonl", [{name: 1}])
    with pytest.raises(UsageError, match="name of a column that each document has"):
        resolve_source([str(path)], keep=[name])


def refused(source: str | None = None, *inputs: str) -> OlmError:
    with pytest.raises(OlmError) as caught:
        resolve_source(list(inputs), source=source)
    return caught.value


@pytest.mark.parametrize("path", ["./local", "../local", "/data/local", "~/local"])
def test_a_local_path_as_a_source_is_called_one(path: str) -> None:
    error = refused(path)
    assert isinstance(error, UsageError)
    assert "this is a local path" in error.what
    assert error.fix == f"name files and folders without --source: {path}"


def test_a_file_that_is_here_as_a_source_is_called_one(here: Path) -> None:
    Path("books.jsonl").write_text("{}")
    assert "this is a local path" in refused("books.jsonl").what
    assert "there is no source named" in refused("other.jsonl").what


@pytest.mark.parametrize(
    "name", ["", "a/b/c", "a b", ":main", "a//b", "./x", "//~/x", "//datasets/o/n/a.txt"]
)
def test_what_cannot_name_a_dataset_is_not_looked_for_on_the_hub(name: str) -> None:
    error = refused(f"hf:{name}")
    assert isinstance(error, UsageError)
    assert "not the name of a dataset" in error.what
    assert "without --source" in (error.fix or "")


def test_files_of_the_hub_are_inputs_and_its_datasets_are_sources() -> None:
    assert refused(None, "hf:org/name").fix == "--source hf:org/name"


def test_a_tokenizer_that_is_not_there_is_not_a_failure_of_the_network() -> None:
    with pytest.raises(UsageError, match="neither a local path nor a hub repository"):
        load_tokenizer("./nowhere")


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"inputs": ["a.jsonl"], "source": "pylib"},
        {"inputs": ["a.jsonl"], "subset": "x"},
        {"inputs": ["a.jsonl"], "root": "/x"},
        {"source": "pylib", "root": "/x"},
        {"source": "pylib", "split": "train"},
        {"source": "pylib", "subset": "nothing"},
        {"source": "hf:a/b", "subset": "x"},
        {"source": "finewebedu"},
        {"source": "fineweb-edu", "subset": "sample-10bt"},
    ],
    ids=str,
)
def test_arguments_that_do_not_go_together_are_usage_errors(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        resolve_source(**arguments)
