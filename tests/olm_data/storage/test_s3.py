"""One attempt at each request on a real S3 server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.service_checks import check_service

from olm_data.storage.bucket import service
from olm_data.storage.s3 import _stay
from olm_data.storage.service import Refusal


def test_each_request_does_what_it_says(s3: dict[str, str], tmp_path: Path) -> None:
    check_service(service("s3"), s3["bucket"], tmp_path)


def test_a_refusal_that_only_such_a_store_gives_is_explained(s3: dict[str, str]) -> None:
    assert service("s3").advice(Refusal(412), "GetObject") is None


# Which redirects of an S3 address botocore may act on.
AWS, OTHER = "https://b.s3.us-east-1.amazonaws.com/a", "https://store.example/b/a"


@pytest.mark.parametrize(
    ("url", "status", "region", "stays"),
    [
        (AWS, 301, "eu-west-1", False),  # botocore makes the address of the region itself
        (AWS, 307, "", True),  # it would ask for the region, and be redirected again
        (AWS, 301, "evil.example/", True),
        ("https://amazonaws.com.evil.example/b/a", 301, "eu-west-1", True),
        (OTHER, 301, "eu-west-1", True),
        (OTHER, 302, "", True),
        (OTHER, 400, "eu-west-1", False),  # the same address, signed for its own region
    ],
)
def test_only_aws_may_name_another_region(url: str, status: int, region: str, stays: bool) -> None:
    answer = {"ResponseMetadata": {"HTTPHeaders": {"x-amz-bucket-region": region}}}
    redirect = {"bucket": "b"}
    request = {"url": url, "context": {"s3_redirect": redirect}}
    _stay(request, (SimpleNamespace(status_code=status), answer))
    assert redirect.get("redirected", False) is stays
