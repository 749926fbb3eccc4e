"""Row 37 (lock): a lock edited by hand is refused, whatever was edited."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forged import forged_lock
from support.stand_in import MANIFEST, compiled

from olm_data.errors import ConflictError, ValidationError
from olm_data.mixture.lock import UNDIGESTED, Lock


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, (dict, list)):
            yield from leaves(item, (*path, key))
        else:
            yield (*path, key)


def edited(content: Any, path: tuple[Any, ...]) -> Any:
    content = json.loads(json.dumps(content))
    place = content
    for key in path[:-1]:
        place = place[key]
    old = place[path[-1]]
    place[path[-1]] = old + "x" if isinstance(old, str) else (old or 0) + 1
    return content


def test_an_edit_of_any_digested_value_is_refused(tmp_path: Path) -> None:
    content = json.loads(compiled(MANIFEST).encode())
    path = tmp_path / "m.lock.json"
    changed = [keys for keys in leaves(content) if keys[0] not in UNDIGESTED] + [("digest",)]
    assert len(changed) > 40
    for keys in changed:
        path.write_text(json.dumps(edited(content, keys)))
        with pytest.raises(ValidationError) as error:
            Lock.read(path)
        assert error.value.exit_code == 3
        assert error.value.where == str(path)


def test_added_removed_and_retyped_keys_are_refused(tmp_path: Path) -> None:
    content = json.loads(compiled(MANIFEST).encode())
    path = tmp_path / "m.lock.json"
    without = [{k: v for k, v in content.items() if k != key} for key in content]
    retyped = [content | {"seed": "1"}, content | {"seed": 1.5}, content | {"sources": {}}]
    for broken in [*without, *retyped, content | {"skip": 1}, content | {"folder": "/x"}]:
        path.write_text(json.dumps(broken))
        with pytest.raises(ValidationError):
            Lock.read(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rows_by_source", [1, 1]), ("counts", [1]), ("block", 7), ("counts", [-3, 23])],
)
def test_numbers_that_do_not_fit_are_refused_even_with_a_forged_digest(
    tmp_path: Path, key: str, value: Any
) -> None:
    content = json.loads(compiled(MANIFEST).encode())
    content["stages"][0][key] = value
    path = tmp_path / "m.lock.json"
    path.write_bytes(forged_lock(content))
    with pytest.raises(ValidationError):
        Lock.read(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = compiled(MANIFEST).encode()
    path = tmp_path / "m.lock.json"
    for length in range(len(data) - 2):  # without its last newline it is still whole
        path.write_bytes(data[:length])
        with pytest.raises(ValidationError):
            Lock.read(path)


def test_mix_does_not_replace_an_edited_lock_unasked(tmp_path: Path) -> None:
    lock, path = compiled(MANIFEST), tmp_path / "m.lock.json"
    path.write_text(json.dumps(edited(json.loads(lock.encode()), ("seed",))))
    before = path.read_bytes()
    with pytest.raises(ConflictError):
        lock.write(path)
    assert path.read_bytes() == before
    assert lock.write(path, overwrite=True) == "written"


def test_locations_may_be_edited_because_data_moves(tmp_path: Path) -> None:
    content = json.loads(compiled(MANIFEST).encode())
    path = tmp_path / "m.lock.json"
    path.write_text(json.dumps(edited(content, ("locations", "web"))))
    assert Lock.read(path).locations["web"] == "tokens/webx"
