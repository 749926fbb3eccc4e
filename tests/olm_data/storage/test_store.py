"""Promises of the store: names appear whole, once, and errors say what to do."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path

import pytest
from support.clouds import environment

from olm_data.errors import ConflictError, StorageError
from olm_data.storage.exclusive import exclusive
from olm_data.storage.store import Store


@pytest.fixture(params=["local", "memory", "s3", "gs", "az"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    kind = request.param
    if kind == "local":
        return Store(tmp_path / "store")
    if kind == "memory":
        return Store(f"memory://bucket/{tmp_path.name}")
    if kind == "s3":
        server = request.getfixturevalue("s3")
    else:
        server = request.getfixturevalue(f"{kind}_server")
        for name, value in environment(kind, server["endpoint_url"]).items():
            monkeypatch.setenv(name, value)
    return Store(f"{kind}://{server['bucket']}/{tmp_path.name}")


def test_put_then_read_returns_the_bytes_and_replaces(store: Store) -> None:
    assert store.size("a") is None
    store.put("a", b"one")
    store.put("a", b"three")
    assert (store.read("a"), store.size("a")) == (b"three", 5)


def test_create_succeeds_once(store: Store) -> None:
    store.create("manifest.json", b"{}")
    with pytest.raises(ConflictError, match="already written"):
        store.create("manifest.json", b"[]")
    assert store.read("manifest.json") == b"{}"


def test_publish_moves_a_finished_file(store: Store) -> None:
    data = os.urandom(100_000)
    with store.staging() as staging:
        (staging / "x").write_bytes(data)
        store.publish("shard-00000.tokens.npy", staging / "x", hashlib.sha256(data).hexdigest())
    assert store.read("shard-00000.tokens.npy") == data


def test_a_part_of_a_file_ends_where_the_file_does(store: Store) -> None:
    store.put("a", b"hello")
    assert [store.read("a", 1, 3), store.read("a", 3, 9), store.read("a", 5, 9)] == [
        *(b"el", b"lo", b""),
    ]
    store.put("empty", b"")
    assert (store.read("empty"), store.size("empty"), store.read("empty", 0, 5)) == (b"", 0, b"")


def test_replace_asks_for_what_was_there(store: Store) -> None:
    store.put("a", b"one")
    store.replace("a", b"two", b"one")
    store.replace("a", b"two", b"one")  # it holds that already
    with pytest.raises(ConflictError, match="changed this file"):
        store.replace("a", b"three", b"one")
    assert store.read("a") == b"two"


def test_listing_gives_names_and_sizes_below_the_folder_only(store: Store) -> None:
    store.put("a/deep/one", b"1")
    store.put("a/two", b"22")
    store.put("b", b"")
    child = store.child("a")
    assert [(entry.name, entry.size) for entry in child.entries()] == [("deep/one", 1), ("two", 2)]
    assert child.sizes() == {"two": 2}
    assert store.sizes("b") == {"b": 0}
    child.clear()
    assert [entry.name for entry in store.entries()] == ["b"]


def test_deleting_what_is_not_there_is_no_error(store: Store) -> None:
    store.put("a", b"x")
    store.delete("a")
    store.delete("a")
    assert not store.exists("a")


def test_one_writer_holds_the_folder(store: Store) -> None:
    with (
        exclusive(store),
        pytest.raises(ConflictError, match="another process is writing"),
        exclusive(Store(store.root)),
    ):
        pass
    with exclusive(store) as lease:
        lease.check()


def test_a_large_file_is_checked(store: Store) -> None:
    data = os.urandom(40 << 20)  # above twice the smallest part
    with store.staging() as staging:
        (staging / "x").write_bytes(data)
        store.publish("big", staging / "x", hashlib.sha256(data).hexdigest())
    assert hashlib.sha256(store.read("big")).digest() == hashlib.sha256(data).digest()


def test_reading_what_is_not_there_is_file_not_found(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.read("absent")


def test_a_store_crosses_processes_without_its_connections(store: Store) -> None:
    store.put("a", b"x")
    assert pickle.loads(pickle.dumps(store)).read("a") == b"x"


def test_nothing_but_the_file_is_left_in_the_folder(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("a", b"x")
    store.create("b", b"y")
    with exclusive(store):
        pass
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_wrong_bucket_and_wrong_secret_are_storage_errors(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageError):
        Store("s3://no-such-bucket-here/x").put("a", b"x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-value")
    with pytest.raises(StorageError) as refused:
        Store(f"s3://{s3['bucket']}/x").put("a", b"x")
    assert "wrong-secret-value" not in str(refused.value)
    assert refused.value.exit_code == 6
