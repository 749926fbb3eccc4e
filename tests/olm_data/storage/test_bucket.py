"""What a bucket promises, whose ever it is; `tests/faults` has it on real servers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.racing import restless

from olm_data.errors import UsageError, ValidationError
from olm_data.storage.bucket import Bucket, open_bucket, service
from olm_data.storage.objects import RemoteFailure


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


def test_a_listing_holds_what_begins_with_the_prefix_and_deleting_twice_is_no_error(
    bucket: Bucket,
) -> None:
    for key in ("x/b", "x/a", "xy", "z"):
        bucket.put(key, b"1")
    assert [item.key for item in bucket.list("x")] == ["x/a", "x/b", "xy"]
    bucket.delete("x/a")
    bucket.delete("x/a")
    assert bucket.head("x/a") is None


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
