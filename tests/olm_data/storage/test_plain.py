"""Memory and web keep the promises of a store, and say what they cannot do."""

from __future__ import annotations

import http.server
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from olm_data.errors import OlmError, UsageError
from olm_data.storage.bucket import service
from olm_data.storage.store import Store


@pytest.fixture
def memory() -> Store:
    return Store(f"memory://bucket-{uuid.uuid4().hex}/a")


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
    assert (store.size("file.txt"), store.read("file.txt")) == (10, b"0123456789")
    assert store.size("none.txt") is None
    with pytest.raises(UsageError, match="no folder of a web server can be listed"):
        store.entries()
    with pytest.raises(OlmError, match="read"):
        store.put("new.txt", b"x")
