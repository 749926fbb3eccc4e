"""A training run that stops, waits or dies at a step: the command itself, with one hook more.

    python two_runs.py OWN_EXIT_CODE_FILE WHAT STEP [argument of olm_train.run ...]

WHAT: `pause` (SIGSTOP), `kill` (SIGKILL), or a file to wait for. READY is printed before the run
begins, and a line is read first: a barrier for two of them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    """Run; return the exit code of the command."""
    from olm_train.callbacks.metrics_logger import MetricsLoggerCallback
    from olm_train.run.command import main as train

    what, step = sys.argv[2], int(sys.argv[3])

    def post_step(callback: MetricsLoggerCallback) -> None:
        if callback.trainer.step != step or not callback.trainer.world.main:
            return
        if what in ("pause", "kill"):
            os.kill(os.getpid(), signal.SIGSTOP if what == "pause" else signal.SIGKILL)
            return
        deadline = time.monotonic() + 600
        while not Path(what).exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    MetricsLoggerCallback.post_step = post_step  # type: ignore[method-assign]
    if os.environ.get("RANK", "0") == "0":
        print("READY", flush=True)
        sys.stdin.readline()
    code = train(sys.argv[4:])
    Path(f"{sys.argv[1]}-{os.environ.get('RANK', '0')}").write_text(str(code))
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
