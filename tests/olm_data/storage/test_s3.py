"""One attempt at each request on a real S3 server."""

from __future__ import annotations

from pathlib import Path

from support.service_checks import check_service

from olm_data.storage.bucket import service
from olm_data.storage.service import Refusal


def test_each_request_does_what_it_says(s3: dict[str, str], tmp_path: Path) -> None:
    check_service(service("s3"), s3["bucket"], tmp_path)


def test_a_refusal_that_only_such_a_store_gives_is_explained(s3: dict[str, str]) -> None:
    assert service("s3").advice(Refusal(412), "GetObject") is None
