"""FAULTS row 8: a stalled or very slow store is noticed, tried again, said, never awaited."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.store_proxy import Proxy, delay, operate, stall, throttled

from olm_data.errors import StorageError
from olm_data.storage import bucket, service
from olm_data.storage.bucket import Backoff
from olm_data.storage.store import Store


@pytest.fixture
def store(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(service, "READ_TIMEOUT", 0.4)
    return Store(f"s3://{proxy.server['bucket']}/{tmp_path.name}")


@pytest.mark.parametrize("operation", ["write", "read", "size", "list", "delete"])
def test_08_a_stalled_request_is_given_up_and_made_again(
    operation: str, store: Store, proxy: Proxy
) -> None:
    store.put("a", b"x")
    proxy.clear()
    proxy.inject(stall)
    operate(operation, store)
    assert len(proxy.seen) >= 2


def test_08_a_store_that_stays_silent_is_exit_6_and_the_waiting_is_said(
    store: Store,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(bucket, "BACKOFF", Backoff(attempts=4, first=0.001))
    proxy.inject(stall, times=None)
    with caplog.at_level(logging.WARNING), pytest.raises(StorageError) as caught:
        store.read("a")
    assert caught.value.exit_code == 6
    assert "4 times: no answer in time" in str(caught.value)
    assert [record.getMessage() for record in caplog.records] == [
        f"{store.root}/a: no answer in time (ReadTimeoutError); trying again ({n})" for n in (3, 4)
    ]


def test_08_a_slow_answer_is_not_a_stalled_one(
    store: Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "READ_TIMEOUT", 1.0)
    store.put("a", bytes(10_000))

    def requests() -> int:
        proxy.clear()
        proxy.inject(throttled(7_000), delay(0.2))
        assert store.read("a") == bytes(10_000)  # takes longer than the read timeout
        assert store.read("a") == bytes(10_000)
        return len(proxy.seen)

    # Tried again, as each answer is a stalled one where the machine stands still for a second.
    assert any(requests() == 2 for _ in range(5))
