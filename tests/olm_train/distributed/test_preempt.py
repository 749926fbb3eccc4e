"""A signal or the time limit becomes one answer; what a run does then: faults/test_52."""

from __future__ import annotations

import os
import signal
import time

import pytest

from olm_data.errors import UsageError
from olm_train.distributed.preempt import (
    CANCELLED,
    LEASE_LOST,
    SLURM_END,
    TIME_LIMIT,
    Preempted,
    Preemption,
    seconds_left,
)


def test_the_first_signal_is_a_flag_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with Preemption() as preemption:
        assert preemption.ask() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)  # a launcher forwards what it got itself
        request = preemption.ask()
        assert preemption.asked == request.code == signal.SIGUSR1
        assert preemption.ask() is preemption.request is request
    assert signal.getsignal(signal.SIGUSR1) == before


def test_it_may_be_entered_twice() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        with preemption:
            pass
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_lost_lease_goes_before_who_cancels_and_that_before_the_time_limit() -> None:
    preemption = Preemption()
    preemption.limit_time(100.0, 200.0)
    assert preemption.asked == TIME_LIMIT
    preemption.cancel("somebody", "")
    assert preemption.asked == CANCELLED
    preemption.lost = lambda: True
    assert preemption.asked == LEASE_LOST


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 75, "SIGTERM at step 3"),
        (signal.SIGINT, 130, "SIGINT at step 3"),
        (TIME_LIMIT, 75, "the time limit at step 3"),
        (CANCELLED, 75, "my_rule (enough) at step 3"),
    ],
)
def test_the_exit_code_says_whether_to_run_it_again(number: int, code: int, said: str) -> None:
    preemption = Preemption()
    if number == CANCELLED:
        preemption.cancel("my_rule", "enough")
        preemption.cancel("another", "too late")
    elif number == TIME_LIMIT:
        preemption.limit_time(100.0, 200.0)
    else:
        preemption.received = number
    request = preemption.ask()
    stopped = Preempted(request, 3)
    assert (stopped.exit_code, str(stopped)) == (code, said)


def test_the_limit_of_a_slurm_job_is_in_its_environment() -> None:
    assert seconds_left(12.5, {}) == 12.5
    end, before = int(time.time()) + 1000, time.time()
    left = seconds_left("slurm", {SLURM_END: str(end)})
    assert end - time.time() <= left <= end - before
    with pytest.raises(UsageError, match="SLURM_JOB_END_TIME"):
        seconds_left("slurm", {})
