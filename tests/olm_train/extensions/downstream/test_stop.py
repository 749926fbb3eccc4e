"""A stop that signal handlers may set at any moment."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

from olm_train.extensions.downstream.watched_run import Stop, stopped_by_sigterm


def test_a_signal_sets_it_and_the_handler_before_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stopped_by_sigterm() as stop:
        stop.wait(0.001)
        assert not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
        stop.wait(600)  # does not
        stop.wait(600)
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_who_waits_goes_on_when_it_is_set() -> None:
    stop = Stop()
    thread = threading.Thread(target=stop.wait, args=(600,))
    thread.start()
    stop.set()
    thread.join(600)
    assert not thread.is_alive()


def set_at(stop: Stop, moment: int) -> None:
    """Wait, and set it at an instruction of that wait, as a signal handler of this thread does."""
    left = moment

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        left -= 1
        if left == 0:
            sys.settrace(None)
            stop.set()
        return trace

    sys.settrace(trace)
    stop.wait(0)
    sys.settrace(None)


def test_it_may_be_set_at_every_instruction_of_a_wait_in_the_same_thread() -> None:
    done = threading.Event()

    def all_moments() -> None:
        for moment in range(1, 300):
            set_at(Stop(), moment)
        done.set()

    threading.Thread(target=all_moments, daemon=True).start()
    assert done.wait(60), "it waits for a lock that it holds"
