"""FAULTS rows 6 to 10 on S3, Google's and Azure's storage: one list of promises for all."""

from __future__ import annotations

import gc
import hashlib
import io
import logging
import os
import signal
import threading
from pathlib import Path

import pytest
from support.clouds import KEY, environment
from support.inline_runner import Never
from support.store_proxy import (
    Exchange,
    Fault,
    Proxy,
    answer,
    cut_request,
    cut_response,
    ignore_condition,
    lost_answer,
    operate,
    reset,
    stall,
    store_proxy,
    throttled,
)
from support.tokenizing import digests, make_dataset, texts, write_jsonl

from olm_data.errors import ConflictError, InputError, ResourceError, StorageError
from olm_data.storage import bucket, service
from olm_data.storage.bucket import Backoff
from olm_data.storage.objects import RemoteFailure
from olm_data.storage.store import Store

BUSY, INTERNAL = answer(503, "ServerBusy"), answer(500, "InternalError")
EVERYWHERE = pytest.mark.parametrize("cloud", ["s3", "gs", "az"], indirect=True)
ALL = [reset, BUSY, lost_answer, INTERNAL, cut_request, cut_response, answer(429, "TooMany")]


@pytest.fixture
def store(cloud_proxy: Proxy, tmp_path: Path) -> Store:
    server = cloud_proxy.server
    return Store(f"{server['kind']}://{server['bucket']}/{tmp_path.name}")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("in") / "a.jsonl", texts(40))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x"
    path.write_bytes(os.urandom(1 << 20) * 40)
    return path


def writes(proxy: Proxy) -> int:
    return sum(seen.method in ("PUT", "POST") for seen in proxy.seen)


def write_of(store: Store) -> str:
    return "POST" if store.root.startswith("gs") else "PUT"


def content(store: Store) -> dict[str, str]:
    found = {entry.name: hashlib.sha256(store.read(entry.name)) for entry in store.entries()}
    return {
        name: digest.hexdigest()
        for name, digest in found.items()
        if name not in ("plan.json", "job.json")  # they tell where the input lies
    }


@EVERYWHERE
@pytest.mark.slow
def test_07_a_run_is_identical_whichever_request_fails_in_all_ways_in_turn(
    cloud_proxy: Proxy, store: Store, source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    make_dataset([source], tiny_tokenizer, tmp_path / "local")
    expected = {k: v for k, v in digests(tmp_path / "local").items() if "." in k}
    expected = {k: v for k, v in expected.items() if k not in ("plan.json", "job.json")}
    store.child("in").put("a.jsonl", source.read_bytes())
    number, requests = 0, 1
    while number < requests:
        cloud_proxy.clear()
        cloud_proxy.inject(*ALL, at=number)
        output = store.url(str(number))
        make_dataset([store.url("in/a.jsonl")], tiny_tokenizer, output)
        requests = len(cloud_proxy.seen) - len(ALL)
        cloud_proxy.clear()
        assert content(Store(output)) == expected, f"fault at request {number}"
        number += 1
    assert number >= 12


@EVERYWHERE
@pytest.mark.slow
def test_07_a_large_upload_is_identical_whichever_request_fails(
    cloud_proxy: Proxy, store: Store, file: Path
) -> None:
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    number, requests = 0, 1
    while number < requests:
        cloud_proxy.clear()
        cloud_proxy.inject(reset, BUSY, lost_answer, cut_request, at=number)
        store.publish("x", file, sha256)
        requests = len(cloud_proxy.seen)
        cloud_proxy.clear()
        assert store.sha256("x") == sha256, f"fault at request {number}"
        store.delete("x")
        number += 1
    assert number >= (5 if store.root.startswith("s3") else 3)  # there: create, parts, complete
    for upload in store.bucket.uploads(store.key("")):  # begun, but we never heard their ids
        store.bucket.abort(upload)


def test_07_a_part_that_fails_on_azure_is_sent_again_alone(
    az_server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    with store_proxy(az_server) as proxy:
        for name, value in environment("az", proxy.url).items():
            monkeypatch.setenv(name, value)
        store = Store(f"az://{az_server['bucket']}/{tmp_path.name}")
        proxy.inject(BUSY, key="comp=block&")
        store.publish("x", file, hashlib.sha256(file.read_bytes()).hexdigest())
        assert writes(proxy) == 5  # three blocks, one of them twice, and their list


@EVERYWHERE
@pytest.mark.parametrize(
    ("operation", "fault", "said"),
    [
        ("write", BUSY, "503 ServerBusy"),
        ("write", INTERNAL, "500 InternalError"),
        ("write", reset, "connection failed"),
        ("read", BUSY, "503 ServerBusy"),
        ("size", BUSY, "503"),  # the answer to HEAD has no body
    ],
)
def test_07_a_store_that_goes_on_failing_is_exit_6_with_key_and_request_id(
    operation: str, fault: Fault, said: str, cloud_proxy: Proxy, store: Store
) -> None:
    cloud_proxy.inject(fault, times=None)
    actions = {"write": lambda: store.put("k", b"x"), "read": lambda: store.read("k")}
    with pytest.raises(StorageError) as caught:
        actions.get(operation, lambda: store.size("k"))()
    text = str(caught.value)
    assert caught.value.exit_code == 6
    assert f"{store.root}/k" in text
    assert "10 times" in text
    assert len(cloud_proxy.seen) == 10  # one loop: the libraries make no attempts of their own
    assert fault is reset or "injected-id" in text
    assert said in text


@EVERYWHERE
def test_07_a_refusal_is_not_repeated(cloud_proxy: Proxy, store: Store) -> None:
    cloud_proxy.inject(answer(403, "Forbidden"), times=None)
    with pytest.raises(RemoteFailure, match="403 Forbidden"):
        store.put("k", b"x")
    assert len(cloud_proxy.seen) == 1


@EVERYWHERE
def test_07_a_created_object_whose_answer_was_lost_is_ours_and_a_rivals_is_not(
    cloud_proxy: Proxy, store: Store
) -> None:
    cloud_proxy.inject(lost_answer, method=write_of(store))
    store.create("manifest.json", b"{}")
    cloud_proxy.inject(reset, method=write_of(store))
    with pytest.raises(ConflictError):  # the same bytes, by somebody else, before our attempts
        store.create("manifest.json", b"{}")
    assert store.read("manifest.json") == b"{}"


def test_07_a_file_that_is_not_what_it_was_said_to_be_is_found(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the store's answer proves nothing, the object is read back."""
    kind = type(bucket.service(store.bucket.scheme))
    real = kind.put_file
    monkeypatch.setattr(kind, "put_file", lambda *given: real(*given) and False)
    path = tmp_path / "y"
    path.write_bytes(b"right")
    store.publish("a", path, hashlib.sha256(b"right").hexdigest())
    with pytest.raises(StorageError, match="other bytes"):
        store.publish("a", path, hashlib.sha256(b"wrong").hexdigest())
    assert store.size("a") is None


def test_07_an_object_changed_on_its_way_is_found_by_reading_it_back(
    proxy: Proxy, tmp_path: Path
) -> None:
    """A store whose ETag is no md5 proves nothing by its answer."""

    def other_etag(exchange) -> None:
        response, data = exchange.forward()
        for name in ("ETag", "x-amz-checksum-crc32"):
            del response.headers[name]
        response.headers["ETag"] = '"not-an-md5"'
        exchange.reply(response, data)

    store = Store(f"s3://{proxy.server['bucket']}/{tmp_path.name}")
    path = tmp_path / "x"
    path.write_bytes(b"right")
    proxy.inject(other_etag, method="PUT", times=None)
    store.publish("a", path, hashlib.sha256(b"right").hexdigest())
    assert store.read("a") == b"right"
    with pytest.raises(StorageError, match="other bytes"):
        store.publish("a", path, hashlib.sha256(b"wrong").hexdigest())
    assert store.size("a") is None


@pytest.mark.parametrize("request_number", [1, 2])
def test_06_a_part_that_the_store_refuses_leaves_nothing_to_see(
    request_number: int, cloud_proxy: Proxy, store: Store, file: Path
) -> None:
    cloud_proxy.inject(answer(403, "Forbidden"), at=request_number)
    with pytest.raises(StorageError, match="403 Forbidden"):
        store.publish("x", file, "0" * 64)
    cloud_proxy.clear()
    assert store.entries() == []


def test_06_a_local_disk_that_fails_while_sending_leaves_nothing_to_see(
    store: Store, file: Path
) -> None:
    file.chmod(0)
    file.unlink()
    file.mkdir()
    with pytest.raises((InputError, ResourceError)):
        store.publish("x", file, "0" * 64)
    assert store.entries() == []


def test_06_an_interrupt_ends_the_upload_and_nothing_appears_later(
    cloud_proxy: Proxy, store: Store, file: Path
) -> None:
    passed, answered = threading.Event(), threading.Event()

    def interrupted(exchange: Exchange) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        passed.wait(1)  # while this request waits, the main thread gets the signal
        answer = exchange.forward()
        answered.set()
        exchange.reply(*answer)

    last = r"comp=blocklist" if write_of(store) == "PUT" else r"upload_id="
    cloud_proxy.inject(interrupted, key=last)
    gc.disable()  # an interrupt inside a callback of the collector is lost
    try:
        with pytest.raises(KeyboardInterrupt):
            store.publish("x", file, "0" * 64)
    finally:
        gc.enable()
    passed.set()
    assert answered.wait(600)  # what was sent before the signal may be done
    before, sent = store.exists("x"), writes(cloud_proxy)
    threading.Event().wait(0.5)
    assert (store.exists("x"), writes(cloud_proxy)) == (before, sent)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "READ_TIMEOUT", 0.4)


@EVERYWHERE
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("operation", ["write", "read", "size", "list", "delete"])
def test_08_a_stalled_request_is_given_up_and_made_again(
    operation: str, cloud_proxy: Proxy, store: Store
) -> None:
    store.put("a", b"x")
    cloud_proxy.clear()
    cloud_proxy.inject(stall)
    operate(operation, store)
    assert len(cloud_proxy.seen) >= 2


@EVERYWHERE
@pytest.mark.usefixtures("hasty")
def test_08_a_store_that_stays_silent_is_exit_6_and_the_waiting_is_said(
    cloud_proxy: Proxy,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(bucket, "BACKOFF", Backoff(attempts=4, first=0.001))
    cloud_proxy.inject(stall, times=None)
    with (
        caplog.at_level(logging.WARNING, logger="olm_data"),
        pytest.raises(StorageError, match="4 times: no answer in time") as caught,
    ):
        store.read("a")
    assert caught.value.exit_code == 6
    said = [r.getMessage() for r in caplog.records if r.name.startswith("olm_data")]
    assert len(said) == 2
    assert all("no answer in time" in line for line in said)


@EVERYWHERE
def test_08_a_slow_answer_is_not_a_stalled_one(
    cloud_proxy: Proxy, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "READ_TIMEOUT", 1.0)
    store.put("a", bytes(10_000))

    def requests() -> int:
        cloud_proxy.clear()
        cloud_proxy.inject(throttled(7_000))
        assert store.read("a") == bytes(10_000)  # takes longer than the read timeout
        return len(cloud_proxy.seen)

    # Tried again, as each answer is a stalled one where the machine stands still for a second.
    assert any(requests() == 1 for _ in range(5))


@EVERYWHERE
def test_09_of_writers_that_create_at_once_one_wins(store: Store) -> None:
    barrier, won, lost = threading.Barrier(4), [], []

    def create(number: int) -> None:
        barrier.wait()
        try:
            Store(store.root).create("manifest.json", f"{number}".encode())
            won.append(number)
        except ConflictError:
            lost.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 3
    assert store.read("manifest.json") == f"{won[0]}".encode()


@EVERYWHERE
@pytest.mark.parametrize(
    ("fault", "said"), [(ignore_condition, "ignores"), (answer(501, "NotImplemented"), "refuses")]
)
def test_10_a_store_without_conditions_is_refused_before_work_unless_the_writer_is_single(
    fault: Fault,
    said: str,
    cloud_proxy: Proxy,
    store: Store,
    source: Path,
    tiny_tokenizer: Path,
    tmp_path: Path,
) -> None:
    cloud_proxy.inject(fault, conditional=True, times=None)
    with pytest.raises(StorageError, match=f"{said} conditional writes") as caught:
        make_dataset([source], tiny_tokenizer, store.root, runner=Never())
    assert caught.value.exit_code == 6
    assert "--single-writer" in str(caught.value.fix)
    assert store.entries() == []
    cloud_proxy.seen.clear()
    log = io.StringIO()
    made = make_dataset([source], tiny_tokenizer, store.root, single_writer=True, log=log)
    assert "nothing keeps a second run" in log.getvalue()
    assert not any(seen.conditional for seen in cloud_proxy.seen)
    local = make_dataset([source], tiny_tokenizer, tmp_path / "local")
    assert made.manifest.digest == local.manifest.digest


def test_07_a_redirect_is_refused(cloud_proxy: Proxy, store: Store) -> None:
    def elsewhere(exchange: Exchange) -> None:
        exchange.handler.send_response_only(307, "Temporary Redirect")
        exchange.handler.send_header("Location", "http://127.0.0.1:9/elsewhere")
        exchange.handler.send_header("Content-Length", "0")
        exchange.handler.end_headers()

    cloud_proxy.inject(elsewhere, times=None)
    with pytest.raises(StorageError, match="redirect") as caught:
        store.read("a")
    assert "not followed" in str(caught.value)
    assert len(cloud_proxy.seen) == 1


def test_07_an_answer_longer_than_what_was_asked_for_is_not_read(
    cloud_proxy: Proxy, store: Store
) -> None:
    store.put("a", bytes(1000))

    def whole(exchange: Exchange) -> None:
        exchange.handler.send_response_only(206, "Partial Content")
        exchange.handler.send_header("Content-Length", str(1 << 40))
        for name, value in (("Content-Range", "bytes 0-9/1000"), ("ETag", '"0x1"')):
            exchange.handler.send_header(name, value)
        exchange.handler.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        exchange.handler.send_header("X-Goog-Generation", "1")
        exchange.handler.end_headers()
        while not exchange.proxy.closing.is_set():
            exchange.handler.wfile.write(bytes(1 << 16))

    cloud_proxy.inject(whole, times=None)
    with pytest.raises(StorageError, match="more than 10 bytes"):
        store.read("a", 0, 10)


def test_73_the_account_key_comes_out_of_no_answer(
    az_server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_proxy(az_server) as proxy:
        for name, value in environment("az", proxy.url).items():
            monkeypatch.setenv(name, value)
        store = Store(f"az://{az_server['bucket']}/{tmp_path.name}")
        store.put("a", f"see {KEY}".encode())
        with pytest.raises(StorageError, match="repeats a credential") as caught:
            store.read("a")
        proxy.inject(answer(403, "Forbidden", f"your key is {KEY}"), times=None)
        with pytest.raises(StorageError, match="403") as refused:
            store.put("b", b"x")
    for error in (caught, refused):
        assert KEY[:12] not in f"{error.value} {vars(error.value)} {error.getrepr(chain=True)}"
