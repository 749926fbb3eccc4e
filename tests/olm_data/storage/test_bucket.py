"""What a bucket promises, whose ever it is; `tests/faults` has it on real servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_data.errors import UsageError, ValidationError
from olm_data.storage.bucket import Bucket, open_bucket
from olm_data.storage.objects import RemoteFailure


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket("memory", tmp_path.name)


def test_a_range_ends_where_the_object_does(bucket: Bucket) -> None:
    bucket.put("a", b"0123456789")
    assert bucket.get("a") == b"0123456789"
    assert bucket.get("a", 2, 5) == b"234"
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
    assert known is not None
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
