"""Promises of the store: names appear whole, once, and errors say what to do."""

from __future__ import annotations

import ast
import fcntl
import hashlib
import os
import pickle
from pathlib import Path

import pytest
from support.clouds import environment
from support.sources import modules, tree

from olm_data.bounded_json import MalformedJson
from olm_data.errors import ConflictError, InputError, StorageError, ValidationError
from olm_data.storage import store as json_file
from olm_data.storage.exclusive import exclusive
from olm_data.storage.lease import Seen, delete_if, put_if, read_versioned
from olm_data.storage.store import Store, create_json, read_json, write_json


@pytest.fixture(params=["local", "memory", "s3", "gs", "az"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    kind = request.param
    if kind == "local":
        return Store(tmp_path / "store")
    if kind == "memory":
        return Store(f"memory://{tmp_path.name}/place")
    server = request.getfixturevalue("s3" if kind == "s3" else f"{kind}_server")
    if kind != "s3":
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
        *(b"el", b"lo", b"")
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


# JSON files: one limit for who writes and who reads them.
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


# A small file is written only over what was seen, on every store that can be written.
@pytest.fixture
def there(store: Store) -> Store:
    """A store whose folder is there: what holds a place writes into one that was made."""
    if not store.remote:
        Path(store.root).mkdir(exist_ok=True)
    return store


@pytest.fixture
def strict(there: Store) -> Store:
    """A store that honours conditions of a delete, as Google does and fake-gcs-server does not.

    What Google is asked for is in test_gcs.py.
    """
    if there.root.startswith("gs:"):
        pytest.skip("fake-gcs-server ignores ifGenerationMatch of a delete")
    return there


def seen(store: Store) -> Seen:
    found = read_versioned(store, "a", 5)
    assert found is not None
    return found


def test_what_was_seen_is_replaced_and_what_changed_since_is_not(there: Store) -> None:
    assert read_versioned(there, "a", 5) is None
    put_if(there, "a", b"first", over=None)
    with pytest.raises(ConflictError):
        put_if(there, "a", b"other", over=None)
    before = seen(there)
    put_if(there, "a", b"later", over=before)
    assert seen(there).data == b"later"
    with pytest.raises(ConflictError) as refused:
        put_if(there, "a", b"other", over=before)
    assert refused.value.where == there.url("a")
    assert seen(there).data == b"later"


def test_what_was_removed_since_stays_away(there: Store) -> None:
    put_if(there, "a", b"first", over=None)
    before = seen(there)
    there.delete("a")
    with pytest.raises(ConflictError):
        put_if(there, "a", b"later", over=before)
    assert read_versioned(there, "a", 5) is None


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
