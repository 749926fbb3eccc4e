"""Where the remote source of a mixture lies."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.store_proxy import Proxy


@pytest.fixture
def url(proxy: Proxy, tmp_path: Path) -> str:
    return f"s3://{proxy.server['bucket']}/{tmp_path.name}/a"
