"""Memory and web keep the promises of a store, and say what they cannot do."""

from __future__ import annotations

import http.server
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from olm_data.errors import ConflictError, OlmError, UsageError
from olm_data.storage.bucket import service
from olm_data.storage.store import Store


@pytest.fixture
def memory() -> Store:
    return Store(f"memory://bucket-{uuid.uuid4().hex}/a")


def test_memory_creates_once_and_replaces_what_it_was_told_of(memory: Store) -> None:
    memory.create("x", b"one")
    with pytest.raises(ConflictError):
        memory.create("x", b"two")
    assert memory.read("x") == b"one"
    memory.replace("x", b"two", b"one")
    with pytest.raises(ConflictError):
        memory.replace("x", b"three", b"one")
    memory.put("x", b"four")
    assert (memory.read("x"), memory.size("x")) == (b"four", 4)
    memory.delete("x")
    assert memory.size("x") is None
    with pytest.raises(FileNotFoundError):
        memory.read("x")


def test_memory_lists_what_is_below_it_alone(memory: Store) -> None:
    memory.put("x", b"1")
    memory.put("sub/y", b"22")
    assert {entry.name: entry.size for entry in memory.entries()} == {"sub/y": 2, "x": 1}
    assert memory.sizes() == {"x": 1}
    assert memory.child("other").entries() == []


def test_memory_lists_what_stays_while_another_thread_deletes(
    memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.put("goes", b"1")
    memory.put("stays", b"22")
    files: Any = service("memory")
    find = files._fs.find

    def meanwhile(*given: Any, **more: Any) -> Any:
        found = find(*given, **more)
        memory.delete("goes")
        return found

    monkeypatch.setattr(files._fs, "find", meanwhile)
    assert memory.sizes() == {"stays": 2}


class Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "file.txt").write_bytes(b"0123456789")
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *given: Files(*given, directory=str(tmp_path))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_file_of_the_web_is_read_and_nothing_else(web: str) -> None:
    store = Store(web)
    assert store.size("file.txt") == 10
    assert store.read("file.txt") == b"0123456789"
    assert store.size("none.txt") is None
    with pytest.raises(UsageError, match="no folder of a web server can be listed"):
        store.entries()
    with pytest.raises(OlmError, match="read"):
        store.put("new.txt", b"x")
