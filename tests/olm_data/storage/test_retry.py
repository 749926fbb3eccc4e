"""Promises of trying again: bounded in number, waiting and time; other errors come at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.storage import bucket
from olm_data.storage.bucket import Backoff, retried


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


def failing(times: int, seen: list[int]):
    def action(attempt: int) -> str:
        seen.append(attempt)
        if attempt <= times:
            raise ConnectionError(attempt)
        return "done"

    return action


@pytest.mark.parametrize("times", range(6))
def test_an_action_is_tried_until_it_succeeds_or_the_attempts_are_spent(
    times: int, clock: Clock
) -> None:
    seen: list[int] = []
    told: list[int] = []
    backoff = Backoff(attempts=5)

    def run() -> str:
        return retried(
            failing(times, seen), backoff, lambda error: True, lambda error, n, s: told.append(n)
        )

    if times < 5:
        assert run() == "done"
    else:
        with pytest.raises(ConnectionError, match="5"):
            run()
    assert seen == list(range(1, min(times + 1, 5) + 1))
    assert told == seen[:-1]
    assert all(wait <= backoff.longest(n) for n, wait in enumerate(clock.waits, 1))


def test_what_is_not_transient_is_raised_at_once(clock: Clock) -> None:
    seen: list[int] = []
    with pytest.raises(ConnectionError):
        retried(failing(9, seen), Backoff(), lambda error: False, lambda *_: None)
    assert (seen, clock.waits) == ([1], [])


def test_no_attempt_starts_after_the_time_is_over(clock: Clock) -> None:
    seen: list[int] = []
    backoff = Backoff(attempts=10_000, within=50)
    with pytest.raises(ConnectionError):
        retried(failing(10_000, seen), backoff, lambda error: True, lambda *_: None)
    assert clock.now <= 50
    assert len(seen) < 10_000


@given(st.integers(1, 1000))
def test_waits_double_up_to_the_longest(attempt: int) -> None:
    backoff = Backoff()
    assert 0 < backoff.longest(attempt) <= backoff.most
    assert backoff.longest(attempt) <= backoff.longest(attempt + 1)
