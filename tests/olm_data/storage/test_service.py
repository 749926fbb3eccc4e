"""What a store has by default, and refusals that repeat no credential."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.service_checks import check_service

from olm_data.errors import UsageError
from olm_data.extensions.http.service import Web
from olm_data.storage.plain import MemoryStore
from olm_data.storage.service import Refusal, base64_md5


def test_memory_does_what_each_request_says(tmp_path: Path) -> None:
    check_service(MemoryStore("memory", {}), "bucket", tmp_path)


def test_a_store_to_read_refuses_to_write(tmp_path: Path) -> None:
    web = Web("http", {})
    path = tmp_path / "file"
    path.write_bytes(b"x")
    for write in (
        lambda: web.put("host", "a", b"x", None),
        lambda: web.put_file("host", "a", path),
        lambda: web.delete("host", "a", ""),
    ):
        with pytest.raises(UsageError, match="can only be read"):
            write()
    assert web.uploads("host", "", None) == ((), None)
    assert web.writer("host", "a") is None


def test_the_words_of_a_refusal_hold_no_credential_and_take_one_line() -> None:
    secret = "0123456789abcdef0123456789abcdef"
    refusal = Refusal(403, "Denied", f"see https://h/?X-Amz-Signature={secret}\nagain", "id\x1b[2J")
    assert secret not in refusal.message
    assert refusal.message.isprintable()
    assert refusal.request.isprintable()
    assert str(refusal) == "403 Denied"


@given(st.binary(max_size=100))
def test_the_md5_is_http_s(data: bytes) -> None:
    assert base64.b64decode(base64_md5(data)) == hashlib.md5(data).digest()
