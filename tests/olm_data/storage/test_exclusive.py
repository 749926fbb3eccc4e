"""The only writer of a folder: others are refused, what the killed left is cleared."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from olm_data.errors import ConflictError, StorageError
from olm_data.storage.bucket import Bucket
from olm_data.storage.exclusive import exclusive, preflight
from olm_data.storage.store import Store


def _hold(root: str, entered, leave) -> None:
    with exclusive(Store(root)):
        entered.set()
        leave.wait()


def test_a_second_writer_is_refused_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    entered, leave = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(str(tmp_path), entered, leave))
    holder.start()
    entered.wait()
    with (
        pytest.raises(ConflictError, match="another process is writing"),
        exclusive(Store(tmp_path)),
    ):
        pass
    (tmp_path / ".staging-left").mkdir()
    holder.kill()
    holder.join()
    with exclusive(Store(tmp_path)):
        assert not (tmp_path / ".staging-left").exists()


# Before work starts: what a store does with two writers is found by trying.
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
