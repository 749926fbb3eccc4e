"""Four faults of s3fs stay closed, whatever versions are installed."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.s3fs_faults import FAULTS, body_of, client_of, say, serving

from olm_data.errors import StorageError
from olm_data.storage import service
from olm_data.storage.store import Store


@pytest.mark.parametrize("check", FAULTS, ids=lambda check: check.__name__)
def test_a_fault_of_s3fs_stays_closed(check: Callable[[], None]) -> None:
    check()


def test_an_upload_that_is_not_taken_is_given_up_within_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "CONNECT_TIMEOUT", 0.3)
    over = threading.Event()

    def full(handler) -> None:  # its kernel takes what it has room for
        over.wait(60)
        handler.close_connection = True

    with serving(full) as (url, _), client_of(url) as ours:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            ours.put("b", "k", bytes(32 << 20), None)
        assert time.monotonic() - start < service.READ_TIMEOUT
        over.set()


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A profile with a login by SSO, which this process uses; its portal is at the address."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def use(portal: str) -> None:
        (tmp_path / "config").write_text(
            "[profile lab]\nsso_start_url = https://lab\nsso_region = us-east-1\n"
            "sso_account_id = 123456789012\nsso_role_name = reader\nregion = us-east-1\n"
        )
        cache = tmp_path / "cache"
        cache.mkdir()
        token = {"accessToken": "login-token", "expiresAt": "2099-01-01T00:00:00Z"}
        name = hashlib.sha1(b"https://lab").hexdigest()
        (cache / f"{name}.json").write_text(json.dumps(token))
        monkeypatch.setattr("botocore.credentials.SSOProvider._SSO_TOKEN_CACHE_DIR", str(cache))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_PROFILE", "lab")
        monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", portal)

    return use


ROLE = {"accessKeyId": "AKIAOFTHELOGIN", "secretAccessKey": "secret", "sessionToken": "session"}


def test_a_profile_with_a_login_by_sso_is_used(
    login: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    signed: list[str] = []

    def portal(handler) -> None:
        assert handler.headers["x-amz-sso_bearer_token"] == "login-token"
        body = json.dumps({"roleCredentials": ROLE | {"expiration": 4_000_000_000_000}}).encode()
        say(handler, 200, len(body))
        handler.wfile.write(body)

    def store(handler) -> None:
        body_of(handler)
        signed.append(handler.headers["Authorization"])
        say(handler, 200, ETag=f'"{hashlib.md5(b"x").hexdigest()}"')

    with serving(portal) as (there, _), serving(store) as (here, _):
        login(there)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", here)
        Store("s3://b").put("k", b"x")
    assert "Credential=AKIAOFTHELOGIN/" in signed[0]


def test_the_token_of_a_login_goes_to_no_other_host(
    login: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(handler) -> None:
        say(handler, 200)

    with serving(elsewhere) as (other, reached):

        def portal(handler) -> None:
            say(handler, 307, Location=f"{other}{handler.path}")

        with serving(portal) as (there, asked):
            login(there)
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", other)
            with pytest.raises(StorageError, match="redirects to another address"):
                Store("s3://b").put("k", b"x")
        assert asked
        assert not reached
