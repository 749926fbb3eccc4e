"""`python -m olm_train.run`, see `command.py`."""

from __future__ import annotations

import atexit
import os
import sys

from olm_data.command import reported
from olm_data.sinks import guard
from olm_data.streams import OutputLost, drop_results, secure_streams
from olm_train.run.command import main


class _Exit:
    """Ends the process once all exit handlers ran, without taking the interpreter apart.

    torch's communication threads may still be dropping the tensors of a last collective. One that
    needs the interpreter while it is being finalised aborts the process (SIGABRT), and a run that
    finished would count as failed. Registered first, so that it is the last handler to run.
    """

    def __init__(self) -> None:
        self.code = 1
        atexit.register(self.leave)

    def leave(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.code)


def entry(argv: list[str] | None = None) -> None:
    """Train, and end the process with the exit code."""
    guard()
    process_exit = _Exit()
    with reported(debug=False):
        secure_streams()  # a log on a full disk must not end the run
    code = main(argv)
    try:
        sys.stdout.flush()
    except OutputLost as error:
        drop_results()
        print(f"error: {error}", file=sys.stderr)
        code = code or error.exit_code
    process_exit.code = code


if __name__ == "__main__":
    entry()
