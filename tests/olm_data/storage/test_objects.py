"""Addresses of objects, and failures to reach them."""

from __future__ import annotations

import pytest

from olm_data.errors import UsageError
from olm_data.storage.objects import LOCATIONS, RemoteFailure, scheme_of, split_url


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
