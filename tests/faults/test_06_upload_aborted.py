"""FAULTS row 6: an upload that breaks off leaves no object, no part and no local file."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
from support.store_proxy import Proxy, answer, reset

from olm_data.errors import ResourceError, StorageError
from olm_data.storage import service
from olm_data.storage.store import Store

SIZE = 40 << 20  # three parts


@pytest.fixture
def store(proxy: Proxy, tmp_path: Path) -> Store:
    return Store(f"s3://{proxy.server['bucket']}/{tmp_path.name}")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x"
    with open(path, "wb") as out:
        os.posix_fallocate(out.fileno(), 0, SIZE)
    return path


def nothing_is_there(store: Store) -> bool:
    return not store.entries() and not list(store.bucket.uploads(store.key("")))


@pytest.mark.parametrize("part", [1, 3])
def test_06_a_part_that_the_store_refuses_aborts_the_upload(
    part: int, store: Store, proxy: Proxy, file: Path
) -> None:
    proxy.inject(answer(403, "AccessDenied"), method="PUT", key=f"partNumber={part}")
    with pytest.raises(StorageError, match="AccessDenied"):
        store.publish("x", file, "0" * 64)
    proxy.clear()
    assert nothing_is_there(store)


def test_06_a_part_that_cannot_be_sent_however_often_aborts_the_upload(
    store: Store, proxy: Proxy, file: Path
) -> None:
    proxy.inject(reset, method="PUT", key="partNumber=2", times=None)
    with pytest.raises(StorageError, match="10 times"):
        store.publish("x", file, "0" * 64)
    proxy.clear()
    assert nothing_is_there(store)


@pytest.mark.parametrize("call", [0, 9, 25])
def test_06_a_local_disk_that_fails_while_sending_aborts_the_upload(
    call: int, store: Store, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(1 << 30))
    real = os.preadv

    def failing(*arguments):
        if next(calls) >= call:
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(service.os, "preadv", failing)
    with pytest.raises(ResourceError, match="input/output error") as caught:
        store.publish("x", file, "0" * 64)
    assert caught.value.exit_code == 5
    monkeypatch.setattr(service.os, "preadv", real)
    assert nothing_is_there(store)


def test_06_an_interrupt_aborts_the_upload_and_removes_the_local_copy(
    store: Store, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def interrupted(exchange):
        monkeypatch.setattr("olm_data.storage.upload._complete", _interrupt)
        exchange.reply(*exchange.forward())

    proxy.inject(interrupted, method="PUT", key="partNumber=3")
    with pytest.raises(KeyboardInterrupt):
        _staged_upload(store)
    assert nothing_is_there(store)
    assert list(tmp_path.iterdir()) == []


def _staged_upload(store: Store) -> None:
    with store.staging() as staging:
        (staging / "x").write_bytes(bytes(SIZE))
        store.publish("x", staging / "x", hashlib.sha256(bytes(SIZE)).hexdigest())


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
