"""A small file is written only over what was seen, on every store that can be written."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from support.clouds import environment

from olm_data.errors import ConflictError
from olm_data.storage.lease import Seen, delete_if, put_if, read_versioned
from olm_data.storage.store import Store


@pytest.fixture(params=["local", "memory", "s3", "gs", "az"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    kind = request.param
    if kind == "local":
        return Store(tmp_path)
    if kind == "memory":
        return Store(f"memory://{tmp_path.name}/place")
    server = request.getfixturevalue("s3" if kind == "s3" else f"{kind}_server")
    if kind != "s3":
        for name, value in environment(kind, server["endpoint_url"]).items():
            monkeypatch.setenv(name, value)
    return Store(f"{kind}://{server['bucket']}/{tmp_path.name}")


@pytest.fixture
def strict(store: Store) -> Store:
    """A store that honours conditions of a delete, as Google does and fake-gcs-server does not.

    What Google is asked for is in test_gcs.py.
    """
    if store.root.startswith("gs:"):
        pytest.skip("fake-gcs-server ignores ifGenerationMatch of a delete")
    return store


def seen(store: Store) -> Seen:
    found = read_versioned(store, "a", 5)
    assert found is not None
    return found


def test_what_was_seen_is_replaced_and_what_changed_since_is_not(store: Store) -> None:
    assert read_versioned(store, "a", 5) is None
    put_if(store, "a", b"first", over=None)
    with pytest.raises(ConflictError):
        put_if(store, "a", b"other", over=None)
    before = seen(store)
    put_if(store, "a", b"later", over=before)
    assert seen(store).data == b"later"
    with pytest.raises(ConflictError) as refused:
        put_if(store, "a", b"other", over=before)
    assert refused.value.where == store.url("a")
    assert seen(store).data == b"later"


def test_what_was_removed_since_stays_away(store: Store) -> None:
    put_if(store, "a", b"first", over=None)
    before = seen(store)
    store.delete("a")
    with pytest.raises(ConflictError):
        put_if(store, "a", b"later", over=before)
    assert read_versioned(store, "a", 5) is None


def test_an_empty_file_is_seen_as_one(store: Store) -> None:
    store.put("a", b"")
    assert seen(store).data == b""


@pytest.fixture
def made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store whose file `a` another process makes again, with the same bytes, while it is read."""
    store, real = Store(tmp_path), os.pread
    put_if(store, "a", b"first", over=None)

    def pread(handle: int, size: int, at: int) -> bytes:
        data = real(handle, size, at)
        os.unlink(tmp_path / "a")
        (tmp_path / "a").write_bytes(b"first")  # of another process
        return data

    monkeypatch.setattr(os, "pread", pread)
    return store


def test_a_file_made_again_between_look_and_write_is_not_the_one_that_was_seen(
    tmp_path: Path, made_again: Store
) -> None:
    put_if(made_again, "a", b"later", over=Seen(b"first", ""))
    assert (tmp_path / "a").read_bytes() == b"first"


def test_only_what_was_seen_is_removed_and_what_is_gone_is_no_error(strict: Store) -> None:
    put_if(strict, "a", b"first", over=None)
    before = seen(strict)
    put_if(strict, "a", b"later", over=before)
    with pytest.raises(ConflictError) as refused:
        delete_if(strict, "a", over=before)
    assert refused.value.where == strict.url("a")
    after = seen(strict)
    assert after.data == b"later"
    delete_if(strict, "a", over=after)
    assert read_versioned(strict, "a", 5) is None
    delete_if(strict, "a", over=after)


def test_what_was_removed_and_made_again_since_is_not_removed(strict: Store) -> None:
    put_if(strict, "a", b"first", over=None)
    before = seen(strict)
    strict.delete("a")
    put_if(strict, "a", b"other", over=None)
    with pytest.raises(ConflictError):
        delete_if(strict, "a", over=before)
    assert seen(strict).data == b"other"


def test_on_a_disk_a_file_made_again_while_it_is_compared_stays(
    tmp_path: Path, made_again: Store
) -> None:
    with pytest.raises(ConflictError):
        delete_if(made_again, "a", over=Seen(b"first", ""))
    assert (tmp_path / "a").read_bytes() == b"first"


def test_on_a_disk_one_process_at_a_time_removes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put_if(store, "a", b"first", over=None)
    with open(tmp_path / "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConflictError):
            delete_if(store, "a", over=Seen(b"first", ""))
    delete_if(store, "a", over=Seen(b"first", ""))
    assert not (tmp_path / "a").exists()
