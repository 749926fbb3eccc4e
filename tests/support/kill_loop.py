"""Kills a tokenise run at every operation, and at random times, and finishes it by a rerun.

usage: kill_loop.py FOLDER TOKENIZER (every | random SEED COUNT) [OPTIONS]

FOLDER holds the inputs `*.jsonl`; OPTIONS are more of `make_dataset`, as JSON. Everything is
imported once; each attempt is a fork of this process, which runs no thread. Prints a line of JSON a
kill: the operation, and what differs from an undisturbed run after the rerun (null: nothing). This
is a program so that pytest is never forked.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import tokenizers
from support.faulty_disk import faults, kill
from support.tokenizing import digests, make_dataset


def forked(body: Callable[[], None]) -> int:
    """Run `body` in a fork; return its wait status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


class Loop:
    """Attempts on one set of inputs."""

    def __init__(self, folder: Path, tokenizer: Path, options: dict[str, Any]) -> None:
        self.folder, self.tokenizer, self.options = folder, tokenizer, options
        self.inputs = sorted(folder.glob("*.jsonl"))
        start = time.monotonic()
        assert forked(self.finish) == 0
        self.seconds = time.monotonic() - start
        self.whole = digests(folder / "out")
        shutil.rmtree(folder / "out")

    def run(self) -> None:
        make_dataset(
            self.inputs,
            self.tokenizer,
            self.folder / "out",
            shard_tokens=500,
            holdout="1/4",
            id_column="id",
            max_bad="100%",
            **self.options,
        )

    def finish(self) -> None:
        """Run on the same output, undisturbed."""
        with faults(-1, kill):
            self.run()

    def check(self, what: str) -> None:
        """Rerun after a kill, compare with the undisturbed run, say so."""
        listed = (self.folder / "out" / "manifest.json").exists()
        torn = listed and self.whole != visible(self.folder / "out")
        if forked(self.finish) != 0:
            print(json.dumps([what, "the rerun failed"]))
            return
        found = digests(self.folder / "out")
        different = sorted(
            name
            for name in found.keys() | self.whole.keys()
            if found.get(name) != self.whole.get(name)
        )
        print(json.dumps([what, different or ("listed while unfinished" if torn else None)]))
        shutil.rmtree(self.folder / "out")

    def every(self) -> None:
        """Kill at operation 0, 1, 2, ... until a run gets through."""
        at = 0
        while True:
            log = self.folder / "log"

            def attempt(at: int = at, log: Path = log) -> None:
                def last_words() -> None:
                    log.write_text(count.log[-1])
                    kill()

                with faults(at, last_words) as count:
                    self.run()

            status = forked(attempt)
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                return
            self.check(f"{at}: {log.read_text()}")
            at += 1

    def random(self, seed: int, count: int) -> None:
        """Kill at random times of the run, from outside."""
        moments = random.Random(seed)
        for _ in range(count):
            after = moments.uniform(0, self.seconds)
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                try:
                    signal.setitimer(
                        signal.ITIMER_REAL, max(after, 1e-4)
                    )  # ends it as SIGKILL would
                    with faults(-1, kill):
                        self.run()
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            self.check(f"after {after:.4f} s")


def visible(folder: Path) -> dict[str, str]:
    """Return the digests of what a killed run left, its lock and staging folders left out."""
    return {
        name: value
        for name, value in digests(folder).items()
        if not name.startswith(".") and "/." not in name
    }


if __name__ == "__main__":
    assert tokenizers.Tokenizer is not None  # imported here, and below pandas, not in each fork
    pa.array([0])
    mode = 4 if sys.argv[3] == "every" else 6
    more = json.loads(sys.argv[mode]) if len(sys.argv) > mode else {}
    loop = Loop(Path(sys.argv[1]), Path(sys.argv[2]), more)
    if sys.argv[3] == "every":
        loop.every()
    else:
        loop.random(int(sys.argv[4]), int(sys.argv[5]))
