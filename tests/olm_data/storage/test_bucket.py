"""What a bucket promises, whose ever it is; `tests/faults` has it on real servers."""

from __future__ import annotations

import base64
import hashlib
import http.server
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.racing import restless
from support.service_checks import check_service

from olm_data.errors import InputError, OlmError, UsageError, ValidationError
from olm_data.extensions.http.service import Web
from olm_data.storage.bucket import Backoff, Bucket, open_bucket, service
from olm_data.storage.failures import is_transient, said, translated
from olm_data.storage.objects import LOCATIONS, RemoteFailure, scheme_of, split_url
from olm_data.storage.plain import MemoryStore
from olm_data.storage.service import CredentialEcho, OversizedAnswer, Refusal, base64_md5
from olm_data.storage.store import Store
from olm_data.storage.upload import part_size


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket("memory", tmp_path.name)


def test_a_range_ends_where_the_object_does(bucket: Bucket) -> None:
    bucket.put("a", b"0123456789")
    assert (bucket.get("a"), bucket.get("a", 2, 5)) == (b"0123456789", b"234")
    assert bucket.get("a", 8, 99) == b"89"
    with pytest.raises(ValidationError, match="10 bytes"):
        bucket.get("a", most=9)
    with pytest.raises(FileNotFoundError, match="memory://"):
        bucket.get("b")


def test_a_condition_that_does_not_hold_leaves_what_is_there(bucket: Bucket) -> None:
    bucket.put("a", b"one", create=True)
    with pytest.raises(FileExistsError):
        bucket.put("a", b"two", create=True)
    known = bucket.head("a")
    bucket.put("a", b"three", replaces=known.etag)
    with pytest.raises(FileExistsError):
        bucket.put("a", b"four", replaces=known.etag)
    assert bucket.get("a") == b"three"
    with pytest.raises(RemoteFailure) as caught:
        bucket.get("a", etag=known.etag)
    assert caught.value.is_other_version


@pytest.mark.parametrize("url", ["ftp://b/a", "s3:///a", "s3://key:secret@b/a"])
def test_a_url_that_names_no_bucket_is_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(UsageError):
        open_bucket(url)


# Services are made once for what the environment says.
def test_a_changed_setting_makes_another_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    first = service("s3")
    assert service("s3") is first
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:2")
    assert service("s3").endpoint() == "http://127.0.0.1:2"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://key:secret@127.0.0.1:2")
    with pytest.raises(UsageError, match="must not hold credentials"):
        service("s3")


def test_settings_that_a_client_refuses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "there-is-no-such-profile")
    with pytest.raises(UsageError, match="refuses its settings: ProfileNotFound") as caught:
        service("s3")
    assert "AWS_ENDPOINT_URL" in str(caught.value.fix)


def test_threads_that_ask_first_get_the_same_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client does not know the uploads in parts that this one has begun."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:3")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    made, begin = set[object](), threading.Barrier(4)

    def ask() -> None:
        begin.wait()
        made.add(service("s3"))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    with restless():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert made == {service("s3")}


@pytest.mark.parametrize(
    ("url", "scheme"), [("s3://b/k", "s3"), ("file:///a", ""), ("/a/b", ""), ("az://c", "az")]
)
def test_a_local_path_has_no_scheme(url: str, scheme: str) -> None:
    assert scheme_of(url) == scheme


def test_a_url_is_a_bucket_and_a_key() -> None:
    assert split_url("s3://b/a/c/") == ("b", "a/c")
    assert split_url("gs://b") == ("b", "")
    with pytest.raises(UsageError, match="names no bucket") as caught:
        split_url("gs:///a")
    assert "gs://BUCKET" in str(caught.value.fix)


def test_a_lock_from_elsewhere_sends_nobody_to_the_web() -> None:
    assert not {"http", "https"} & set(LOCATIONS)


def test_a_condition_that_does_not_hold_is_told_by_status_or_code() -> None:
    assert RemoteFailure("x", status=412).is_other_version
    assert RemoteFailure("x", code="PreconditionFailed").is_other_version
    assert not RemoteFailure("x", status=409).is_other_version


@given(st.integers(0, 5 << 40))
def test_an_object_of_any_size_has_parts_that_stores_take(size: int) -> None:
    part = part_size(size)
    assert 16 << 20 <= part <= 5 << 30
    assert -(-size // part) <= 9000


URL = "memory://b/k"


def words(error: Exception, operation: str = "put_object", attempts: int = 1) -> str:
    found = translated(service("memory"), error, URL, operation, attempts)
    assert isinstance(found, RemoteFailure)
    assert found.exit_code == 6
    assert f"{URL} ({operation}" in str(found.where)
    return str(found)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (Refusal(503, "SlowDown"), True),
        (Refusal(429), True),
        (Refusal(400, "BadDigest"), True),
        (Refusal(501, "NotImplemented"), False),
        (Refusal(403, "AccessDenied"), False),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (ConnectionError("[SSL: CERTIFICATE_VERIFY_FAILED]"), False),
        (KeyError("size"), False),
        (OversizedAnswer("more"), False),
        (InputError("ours"), False),
    ],
)
def test_what_may_pass_is_tried_again_and_nothing_else(error: Exception, again: bool) -> None:
    assert is_transient(error) is again


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (Refusal(503, "SlowDown", "wait", "id-1"), "refused 3 times: 503 SlowDown"),
        (Refusal(403, "AccessDenied"), "what they are allowed to do"),
        (Refusal(400, "ExpiredToken"), "what they are allowed to do"),
        (Refusal(404, "NoSuchBucket"), "the bucket does not exist: 404 NoSuchBucket"),
        (Refusal(307), "redirects to another address: 307"),
        (Refusal(403, "RequestTimeTooSkewed"), "set this machine's clock"),
        (FileNotFoundError("container"), "the bucket does not exist: 404"),
        (CredentialEcho(), "repeats a credential"),
        (OversizedAnswer("more than 10 bytes"), "sends more than 10 bytes"),
        (ConnectionResetError(), "fails 3 times: the connection failed (ConnectionResetError)"),
        (TimeoutError(), "no answer in time (TimeoutError)"),
        (KeyError("size"), "cannot be read"),
    ],
)
def test_a_failure_says_what_went_wrong_and_what_helps(error: Exception, what: str) -> None:
    assert what in words(error, attempts=3)


def test_the_id_of_a_request_is_told_and_its_words_are_bounded() -> None:
    text = words(Refusal(503, "SlowDown", "x" * 500, "id-1"))
    assert "(put_object, request id id-1)" in text
    assert "x" * 80 in text
    assert "x" * 81 not in text
    assert said(Refusal(503, "SlowDown")) == "the store answered 503 SlowDown"


def test_what_is_not_the_stores_doing_stays_as_it_is() -> None:
    here = service("memory")
    for error in (InputError("ours"), OSError(5, "Input/output error"), AssertionError()):
        assert translated(here, error, URL, "put_object", 1) is None
    found = translated(here, FileNotFoundError("k"), URL, "get_object", 1)
    assert isinstance(found, FileNotFoundError)


class Clock:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("olm_data.storage.bucket.time", clock)
    return clock


def asked(times: int, backoff: Backoff, error: type[Exception] = ConnectionError) -> list[int]:
    """Ask a store whose first answers fail; return the numbers of the attempts."""
    seen: list[int] = []

    def answer(_: object) -> str:
        seen.append(len(seen) + 1)
        if len(seen) <= times:
            raise error
        return "done"

    place = Bucket("memory", "retries")
    try:
        assert place.ask("put_object", "x", answer, backoff=backoff) == ("done", times + 1)
    except (RemoteFailure, ZeroDivisionError):
        assert len(seen) <= times
    return seen


@pytest.mark.parametrize("times", range(7))
def test_a_request_is_made_until_it_succeeds_or_the_attempts_are_spent(
    times: int, clock: Clock
) -> None:
    backoff = Backoff(attempts=5)
    assert asked(times, backoff) == list(range(1, min(times + 1, 5) + 1))
    assert len(clock.waits) == min(times, 4)
    assert all(wait <= backoff.longest(n) for n, wait in enumerate(clock.waits, 1))


def test_what_is_not_transient_is_raised_at_once(clock: Clock) -> None:
    assert (asked(9, Backoff(), ZeroDivisionError), clock.waits) == ([1], [])


def test_no_attempt_starts_after_the_time_is_over(clock: Clock) -> None:
    assert len(asked(10_000, Backoff(attempts=10_000, within=50))) < 10_000
    assert clock.now <= 50


@given(st.integers(1, 1000))
def test_waits_double_up_to_the_longest(attempt: int) -> None:
    backoff = Backoff()
    assert 0 < backoff.longest(attempt) <= backoff.most
    assert backoff.longest(attempt) <= backoff.longest(attempt + 1)


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
