"""The text that is on every machine: Python's own, without tests and without doubles."""

from __future__ import annotations

import sysconfig
from hashlib import sha256
from pathlib import Path

import pytest
from support.reading import read_source, resolve_source


def test_the_standard_library_is_source_code_without_tests() -> None:
    read = read_source(source="pylib")
    assert "json/decoder.py" in read.ids
    folders = {part for i in read.ids if i for part in i.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "__pycache__"}
    assert read.ids == sorted(i for i in read.ids if i)
    assert read.places[0][0] == f"pylib:{read.ids[0]}"
    assert sum(map(len, read.texts)) > 5_000_000


def test_the_packages_are_documents_and_not_data() -> None:
    read = read_source(source="pylib", subset="packages")
    names = {Path(i).name for i in read.ids if i}
    assert "METADATA" in names
    assert not names & {"RECORD", "top_level.txt", "entry_points.txt"}
    assert read.texts


@pytest.mark.parametrize("subset", ["stdlib", "packages"])
def test_no_text_is_there_twice_and_no_machine_path_in_any_name(subset: str) -> None:
    plan = resolve_source(source="pylib", subset=subset)
    contents = [sha256(Path(file.url).read_bytes()).digest() for file in plan.inputs]
    assert len(set(contents)) == len(contents)
    root = sysconfig.get_paths()["stdlib" if subset == "stdlib" else "purelib"]
    assert not [file.path for file in plan.inputs if root in file.path]
    assert max(file.bytes for file in plan.inputs) <= 1_000_000
