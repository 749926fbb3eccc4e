"""Promises of trying again: bounded in number, waiting and time; other errors come at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.storage import bucket
from olm_data.storage.bucket import Backoff, Bucket
from olm_data.storage.objects import RemoteFailure


class Clock:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(bucket, "time", clock)
    return clock


def asked(times: int, backoff: Backoff, error: type[Exception] = ConnectionError) -> list[int]:
    """Ask a store whose first answers fail; return the numbers of the attempts."""
    seen: list[int] = []

    def answer(_: object) -> str:
        seen.append(len(seen) + 1)
        if len(seen) <= times:
            raise error
        return "done"

    place = Bucket("memory", "retries")
    try:
        assert place.ask("put_object", "x", answer, backoff=backoff) == ("done", times + 1)
    except (RemoteFailure, ZeroDivisionError):
        assert len(seen) <= times
    return seen


@pytest.mark.parametrize("times", range(7))
def test_a_request_is_made_until_it_succeeds_or_the_attempts_are_spent(
    times: int, clock: Clock
) -> None:
    backoff = Backoff(attempts=5)
    assert asked(times, backoff) == list(range(1, min(times + 1, 5) + 1))
    assert len(clock.waits) == min(times, 4)
    assert all(wait <= backoff.longest(n) for n, wait in enumerate(clock.waits, 1))


def test_what_is_not_transient_is_raised_at_once(clock: Clock) -> None:
    assert (asked(9, Backoff(), ZeroDivisionError), clock.waits) == ([1], [])


def test_no_attempt_starts_after_the_time_is_over(clock: Clock) -> None:
    assert len(asked(10_000, Backoff(attempts=10_000, within=50))) < 10_000
    assert clock.now <= 50


@given(st.integers(1, 1000))
def test_waits_double_up_to_the_longest(attempt: int) -> None:
    backoff = Backoff()
    assert 0 < backoff.longest(attempt) <= backoff.most
    assert backoff.longest(attempt) <= backoff.longest(attempt + 1)
