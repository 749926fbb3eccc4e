"""Services are made once for what the environment says."""

from __future__ import annotations

import threading

import pytest
from support.racing import restless

from olm_data.errors import UsageError
from olm_data.storage.bucket import service


def test_a_changed_setting_makes_another_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    first = service("s3")
    assert service("s3") is first
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:2")
    assert service("s3").endpoint() == "http://127.0.0.1:2"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://key:secret@127.0.0.1:2")
    with pytest.raises(UsageError, match="must not hold credentials"):
        service("s3")


def test_settings_that_a_client_refuses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "there-is-no-such-profile")
    with pytest.raises(UsageError, match="refuses its settings: ProfileNotFound") as caught:
        service("s3")
    assert "AWS_ENDPOINT_URL" in str(caught.value.fix)


def test_threads_that_ask_first_get_the_same_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client does not know the uploads in parts that this one has begun."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:3")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    made, begin = set[object](), threading.Barrier(4)

    def ask() -> None:
        begin.wait()
        made.add(service("s3"))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    with restless():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert made == {service("s3")}
