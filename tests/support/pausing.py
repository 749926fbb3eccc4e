"""A training run that stands still at a line of its own: `pausing.py TEXT [argument of a run ...]`.

After the first line of stderr with TEXT the process stops itself (SIGSTOP), so that who reads the
line finds the run where it wrote it, however late that is.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import TextIO


class Pausing:
    """A stream that stops the process once a line with a text is written."""

    def __init__(self, stream: TextIO, text: str) -> None:
        self._stream, self._text, self._line = stream, text, ""

    def write(self, said: str) -> int:
        count = self._stream.write(said)
        self._line += said
        whole, newline, rest = self._line.rpartition("\n")
        if newline:
            self._line = rest
            if self._text and self._text in whole:
                self._text = ""
                self._stream.flush()
                os.kill(os.getpid(), signal.SIGSTOP)
        return count

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


if __name__ == "__main__":
    from olm_data import sinks

    text, *sys.argv[1:] = sys.argv[1:]
    secure = sinks.secure_streams

    def secured() -> None:
        secure()
        sys.stderr = Pausing(sys.stderr, text)  # type: ignore[assignment]

    sinks.secure_streams = secured  # it makes the stream that the run writes to
    runpy.run_module("olm_train.run", run_name="__main__", alter_sys=True)
