"""Before work starts: what a store does with two writers is found by trying."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_data.errors import StorageError
from olm_data.storage.bucket import Bucket
from olm_data.storage.exclusive import preflight
from olm_data.storage.store import Store


@pytest.fixture
def place(tmp_path: Path) -> str:
    return f"memory://bucket/{tmp_path.name}"


def test_a_good_store_needs_no_note_and_keeps_no_probe(place: str, tmp_path: Path) -> None:
    assert preflight(Store(tmp_path)) == []
    assert preflight(Store(place)) == []
    assert Store(place).entries() == []


def test_who_may_not_delete_is_told_of_the_probe(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Bucket, key: str, **_: str) -> None:
        raise StorageError("not allowed")

    monkeypatch.setattr(Bucket, "delete", refused)
    (note,) = preflight(Store(place))
    assert "stays: not allowed" in note
