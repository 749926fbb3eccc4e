"""A store of each kind that can be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clouds import environment

from olm_data.storage.store import Store


@pytest.fixture(params=["local", "memory", "s3", "gs", "az"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    kind = request.param
    if kind == "local":
        return Store(tmp_path / "store")
    if kind == "memory":
        return Store(f"memory://{tmp_path.name}/place")
    server = request.getfixturevalue("s3" if kind == "s3" else f"{kind}_server")
    if kind != "s3":
        for name, value in environment(kind, server["endpoint_url"]).items():
            monkeypatch.setenv(name, value)
    return Store(f"{kind}://{server['bucket']}/{tmp_path.name}")
