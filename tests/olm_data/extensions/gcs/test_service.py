"""Google Cloud Storage: what does not depend on its server."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clouds import environment
from support.store_proxy import Exchange, answer, store_proxy

from olm_data.errors import ConflictError
from olm_data.storage.lease import delete_if, put_if, read_versioned
from olm_data.storage.objects import RemoteFailure
from olm_data.storage.store import Store

ADDRESS, ANONYMOUS = "STORAGE_EMULATOR_HOST", "CLOUDSDK_AUTH_DISABLE_CREDENTIALS"


def test_without_credentials_nothing_is_asked_and_the_ways_to_them_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    auth = pytest.importorskip("google.auth")
    from google.auth.exceptions import DefaultCredentialsError

    def none(**_: object) -> None:
        raise DefaultCredentialsError("none")

    monkeypatch.delenv(ADDRESS, raising=False)
    monkeypatch.setattr(auth, "default", none)
    with pytest.raises(RemoteFailure, match="no credentials") as caught:
        Store("gs://bucket/a").size("b")
    assert caught.value.exit_code == 6
    for way in ("GOOGLE_APPLICATION_CREDENTIALS", "gcloud auth", ANONYMOUS):
        assert way in str(caught.value.fix)


def test_the_address_of_the_server_holds_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS, "http://user:secret-of-mine@127.0.0.1:1")
    with pytest.raises(ValueError, match="must not hold credentials") as caught:
        Store("gs://bucket/a").size("b")
    assert "secret-of-mine" not in str(caught.value)


def test_a_delete_names_the_generation_that_was_seen(
    gs_server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fake-gcs-server ignores it: the proxy refuses as Google does."""
    asked: list[str] = []

    def refuses(exchange: Exchange) -> None:
        asked.append(exchange.handler.path)
        answer(412, "conditionNotMet")(exchange)

    with store_proxy(gs_server) as proxy:
        for name, value in environment("gs", proxy.url).items():
            monkeypatch.setenv(name, value)
        store = Store(f"gs://{gs_server['bucket']}/{tmp_path.name}")
        put_if(store, "a", b"first", over=None)
        before = read_versioned(store, "a", 5)
        assert before is not None
        proxy.inject(refuses, method="DELETE", times=None)
        with pytest.raises(ConflictError):
            delete_if(store, "a", over=before)
        assert f"ifGenerationMatch={before.version}" in asked[0]
        proxy.clear()
        delete_if(store, "a", over=before)
        assert read_versioned(store, "a", 5) is None
