"""An export in a process of its own, beside a run: begun, looked at, and over with its parent.

    Beside(order) --stdin: one line of JSON--> python -m ...hf_export.beside -> export
                  <--stdout: one line of JSON--
                   stdin ends: the parent is gone, and so is the child, at once

The same `export` as the command's. A child that is killed leaves a draft, which no reader takes and
the next export of that place clears.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from olm_data.bounded_json import decode
from olm_data.errors import OlmError, said_by, shown
from olm_train.extensions.hf_export.job import Options

_GONE_SECONDS = 10.0
"""What a child gets to end that was asked to."""


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be exported: fields as of the command's options."""

    checkpoint: str
    output: str
    options: Options


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of it: `failed` is empty where the folder is there."""

    failed: str = ""
    says: str = ""


class Beside:
    """A child that exports.

    Args:
        order: what.
        log: file that takes what libraries print.
    """

    def __init__(self, order: Order, log: Path) -> None:
        self.order = order
        env = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with open(log, "ab") as file:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "olm_train.extensions.hf_export.beside"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=env,
            )
        assert self._child.stdin is not None
        self._child.stdin.write(msgspec.json.encode(order) + b"\n")
        self._child.stdin.flush()

    @property
    def process_id(self) -> int:
        """Of the child."""
        return self._child.pid

    def answer(self) -> Answer | None:
        """Return what became of it, None while it is at work; does not wait."""
        if self._child.poll() is None:
            return None
        assert self._child.stdout is not None
        said = self._child.stdout.read()
        self._close()
        try:
            return decode(said.splitlines()[-1], Answer)
        except (IndexError, ValueError):
            return Answer(failed=f"the process ended with code {self._child.returncode}")

    def end(self) -> None:
        """End it now; what it wrote so far counts for nothing."""
        self._close_stdin()
        try:
            self._child.wait(_GONE_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._close()

    def _close(self) -> None:
        self._close_stdin()
        if self._child.stdout is not None:
            self._child.stdout.close()

    def _close_stdin(self) -> None:
        if self._child.stdin is not None:
            self._child.stdin.close()


_OF_RANKS = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)


def _end_with_parent() -> None:
    """End this process when its stdin does."""
    while sys.stdin.buffer.read(1 << 10):
        pass
    os._exit(1)


def run() -> int:
    """Export what a line of stdin asks for; return the exit code."""
    order = decode(sys.stdin.buffer.readline(), Order)
    threading.Thread(target=_end_with_parent, name="olm-parent", daemon=True).start()
    answer, code = Answer(), 0
    try:
        answer = Answer(says=_export(order))
    except OlmError as error:
        answer, code = Answer(failed=shown(str(error))), error.exit_code
    except Exception as error:
        answer, code = Answer(failed=f"{type(error).__name__}: {said_by(error)}"), 1
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
    return code


def _export(order: Order) -> str:
    from olm_train.checkpoint.load import open_checkpoint
    from olm_train.distributed.world import World
    from olm_train.extensions.hf_export.export import export

    found = open_checkpoint(order.checkpoint, World())
    return export(found, order.output, order.options).receipt.model_class


if __name__ == "__main__":
    sys.stdout.flush()
    code = run()
    sys.stdout.flush()
    os._exit(code)  # the thread that waits for the parent cannot be joined
