"""FAULTS rows 6 and 7: uploads that break off leave nothing; Google's go on where the store is."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clouds import environment
from support.store_proxy import (
    Exchange,
    Fault,
    Proxy,
    answer,
    cut_request,
    lost_answer,
    passing,
    reset,
    store_proxy,
)

from olm_data.errors import ConflictError, ResourceError, StorageError
from olm_data.storage import bucket, service
from olm_data.storage.bucket import Backoff
from olm_data.storage.objects import RemoteFailure
from olm_data.storage.store import Store

SIZE = 40 << 20  # three parts


@pytest.fixture
def s3_store(proxy: Proxy, tmp_path: Path) -> Store:
    return Store(f"s3://{proxy.server['bucket']}/{tmp_path.name}")


@pytest.fixture
def three_parts(tmp_path: Path) -> Path:
    path = tmp_path / "x"
    with open(path, "wb") as out:
        os.posix_fallocate(out.fileno(), 0, SIZE)
    return path


def nothing_is_there(s3_store: Store) -> bool:
    return not s3_store.entries() and not list(s3_store.bucket.uploads(s3_store.key("")))


@pytest.mark.parametrize("part", [1, 3])
def test_06_a_part_that_the_store_refuses_aborts_the_upload(
    part: int, s3_store: Store, proxy: Proxy, three_parts: Path
) -> None:
    proxy.inject(answer(403, "AccessDenied"), method="PUT", key=f"partNumber={part}")
    with pytest.raises(StorageError, match="AccessDenied"):
        s3_store.publish("x", three_parts, "0" * 64)
    proxy.clear()
    assert nothing_is_there(s3_store)


def test_06_a_part_that_cannot_be_sent_however_often_aborts_the_upload(
    s3_store: Store, proxy: Proxy, three_parts: Path
) -> None:
    proxy.inject(reset, method="PUT", key="partNumber=2", times=None)
    with pytest.raises(StorageError, match="10 times"):
        s3_store.publish("x", three_parts, "0" * 64)
    proxy.clear()
    assert nothing_is_there(s3_store)


@pytest.mark.parametrize("call", [0, 9, 25])
def test_06_a_local_disk_that_fails_while_sending_aborts_the_upload(
    call: int, s3_store: Store, three_parts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(1 << 30))
    real = os.preadv

    def failing(*arguments):
        if next(calls) >= call:
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(service.os, "preadv", failing)
    with pytest.raises(ResourceError, match="input/output error") as caught:
        s3_store.publish("x", three_parts, "0" * 64)
    assert caught.value.exit_code == 5
    monkeypatch.setattr(service.os, "preadv", real)
    assert nothing_is_there(s3_store)


def test_06_an_interrupt_aborts_the_upload_and_removes_the_local_copy(
    s3_store: Store, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def interrupted(exchange):
        monkeypatch.setattr("olm_data.storage.upload._complete", _interrupt)
        exchange.reply(*exchange.forward())

    proxy.inject(interrupted, method="PUT", key="partNumber=3")
    with pytest.raises(KeyboardInterrupt):
        _staged_upload(s3_store)
    assert nothing_is_there(s3_store)
    assert list(tmp_path.iterdir()) == []


def _staged_upload(s3_store: Store) -> None:
    with s3_store.staging() as staging:
        (staging / "x").write_bytes(bytes(SIZE))
        s3_store.publish("x", staging / "x", hashlib.sha256(bytes(SIZE)).hexdigest())


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "x"
    path.write_bytes(os.urandom(40 << 20))
    return path


@pytest.fixture
def google(
    gs_server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Proxy, Store]]:
    """A proxy in front of Google's server, and a store behind it."""
    monkeypatch.setattr(bucket, "BACKOFF", Backoff(attempts=6, first=0.001))
    with store_proxy(gs_server) as proxy:
        for name, value in environment("gs", proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy, Store(f"gs://{gs_server['bucket']}/{tmp_path.name}")


PARTS = r"upload_id="


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fault", "bytes_again"),
    [(reset, 1.0), (answer(503, "ServerBusy"), 1.0), (lost_answer, 0.0), (cut_request, 0.5)],
    ids=["reset", "busy", "lost answer", "cut"],
)
def test_07_a_part_that_fails_on_google_is_gone_on_with_where_the_store_is(
    google: tuple[Proxy, Store], file: Path, fault: Fault, bytes_again: float, part: int
) -> None:
    proxy, store = google
    sent: list[tuple[str, int]] = []

    def counted(exchange: Exchange) -> None:
        sent.append((exchange.handler.headers["Content-Range"], len(exchange.body)))
        (fault if len(sent) == part + 1 else passing)(exchange)

    proxy.inject(counted, method="PUT", key=PARTS, times=None)
    store.publish("x", file, hashlib.sha256(file.read_bytes()).hexdigest())
    proxy.clear()
    assert store.read("x") == file.read_bytes()
    size = file.stat().st_size
    whole = (32 << 20) if part == 0 else size - (32 << 20)
    again = sum(count for _, count in sent) - size
    assert again == whole * bytes_again
    assert [span for span, count in sent if count == 0] == [f"bytes */{size}"]


def test_07_a_large_file_on_google_takes_the_place_only_of_what_was_there_when_it_began(
    google: tuple[Proxy, Store], file: Path
) -> None:
    proxy, store = google

    def rival(exchange: Exchange) -> None:
        store.put("x", b"theirs")
        passing(exchange)

    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    proxy.inject(passing, rival, method="PUT", key=PARTS)
    with pytest.raises(ConflictError, match="in the meantime") as refused:
        store.publish("x", file, sha256)
    assert refused.value.exit_code == 7
    assert store.read("x") == b"theirs"
    assert any(seen.method == "DELETE" and "upload_id=" in seen.path for seen in proxy.seen)
    store.publish("x", file, sha256)  # over what is there now
    assert store.sha256("x") == sha256


def test_07_the_same_bytes_from_another_process_meanwhile_are_no_conflict(
    google: tuple[Proxy, Store], file: Path
) -> None:
    proxy, store = google
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()

    def rival(exchange: Exchange) -> None:
        store.publish("x", file, sha256)
        passing(exchange)

    proxy.inject(passing, rival, method="PUT", key=PARTS)
    store.publish("x", file, sha256)
    assert store.sha256("x") == sha256


def test_07_an_upload_that_google_has_forgotten_is_told_as_that(
    google: tuple[Proxy, Store], file: Path
) -> None:
    proxy, store = google
    proxy.inject(answer(410, "gone"), method="PUT", key=PARTS, times=None)
    with pytest.raises(RemoteFailure, match="410 UploadGone"):
        store.publish("x", file, hashlib.sha256(file.read_bytes()).hexdigest())
    assert store.size("x") is None
