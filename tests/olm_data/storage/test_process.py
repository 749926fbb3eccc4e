"""What one process can know of another."""

from __future__ import annotations

import subprocess
import sys

from olm_data.storage.process import ProcessState, state_of, this_process


def test_a_process_is_known_by_machine_number_and_start() -> None:
    me = this_process()
    assert state_of(me) is ProcessState.running
    assert state_of(me._replace(machine="another")) is ProcessState.elsewhere
    assert (
        state_of(me._replace(started=me.started + 1)) is ProcessState.dead
    )  # its number is another's


def test_a_process_that_ended_is_dead_though_nobody_has_waited_for_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = this_process()._replace(pid=child.pid, started=0)
    assert state_of(process) is ProcessState.running
    child.kill()
    child.wait()
    assert state_of(process) is ProcessState.dead
