"""A hub on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub_stub import HubStub, write_fineweb_edu


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HubStub, list[str]]]:
    root = tmp_path_factory.mktemp("hub")
    texts = write_fineweb_edu(root)
    with HubStub(root).running() as stub:
        yield stub, texts


@pytest.fixture
def endpoint(
    hub: tuple[HubStub, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> HubStub:
    """The stub, for clients that read HF_ENDPOINT when they are called."""
    for name, value in hub[0].environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    return hub[0]
