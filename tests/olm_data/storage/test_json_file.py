"""JSON files: one limit for who writes and who reads them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.sources import modules, tree

from olm_data.bounded_json import MalformedJson
from olm_data.errors import InputError, ValidationError
from olm_data.storage import store as json_file
from olm_data.storage.store import Store, create_json, read_json, write_json

DOCUMENTS = {"MANIFEST", "PLAN", "JOB", "RECORD", "plan_name"}


@pytest.mark.parametrize("write", [create_json, write_json])
def test_what_could_not_be_read_again_is_refused_before_it_is_written(
    write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_file, "MAX_DOCUMENT", 10)
    store = Store(tmp_path / "store")
    write(store, "fits.json", b"1" * 10)
    assert read_json(store, "fits.json") == b"1" * 10
    with pytest.raises(InputError, match="would have 11 bytes") as caught:
        write(store, "large.json", b"1" * 11)
    assert caught.value.fix is not None
    assert not store.exists("large.json")
    store.put("large.json", b"1" * 11)
    with pytest.raises(ValidationError, match="has 11 bytes"):
        read_json(store, "large.json")


def test_a_document_beyond_the_limit_is_refused_by_its_size_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_file, "MAX_DOCUMENT", 100)
    monkeypatch.setattr(json_file, "_AT_ONCE", 8)
    monkeypatch.setattr(Store, "pieces", lambda *_: pytest.fail("it was read"))
    (tmp_path / "x.json").write_bytes(b"[" + b" " * 200)
    with pytest.raises(ValidationError):
        read_json(Store(tmp_path), "x.json")


def test_a_hole_after_a_good_beginning_is_refused_and_not_held(tmp_path: Path) -> None:
    with open(tmp_path / "x.json", "wb") as file:
        file.write(b'{"a": "' + b"x" * (9 << 20))
        file.truncate(1 << 30)
    with pytest.raises(MalformedJson):
        read_json(Store(tmp_path), "x.json")


def names_in(node: ast.expr) -> set[str]:
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def test_no_document_of_a_dataset_is_written_past_the_limit_of_its_reader() -> None:
    calls = [
        (path.name, node)
        for path in modules("olm_data/dataset")
        + modules("olm_data/tokenization")
        + modules("olm_data/extensions/importing")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute)
    ]
    assert calls
    past = [
        f"{name}:{node.lineno}"
        for name, node in calls
        if node.func.attr in ("put", "create") and names_in(node.args[0]) & DOCUMENTS
    ]
    assert past == []
