"""One attempt at each request on a real server of Azure's protocol."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clouds import environment
from support.service_checks import check_service

from olm_data.storage.bucket import service


def test_each_request_does_what_it_says(
    az_server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(az_server["kind"], az_server["endpoint_url"]).items():
        monkeypatch.setenv(name, value)
    check_service(service("az"), az_server["bucket"], tmp_path)
