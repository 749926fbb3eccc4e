"""Kills a tokenise run at every operation, and at random times, and finishes it by a rerun.

usage: kill_loop.py FOLDER TOKENIZER (every | add STRIDE | random SEED COUNT) [OPTIONS]

FOLDER holds the inputs `*.jsonl`; `add` tokenises the first and kills the addition of the others,
at every STRIDE-th operation. OPTIONS are more of `make_dataset`, as JSON. Everything is
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
from support.adding import add_to
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
        self.begin()
        start = time.monotonic()
        assert forked(self.finish) == 0
        self.seconds = time.monotonic() - start
        self.whole = digests(folder / "out")
        shutil.rmtree(folder / "out")

    def begin(self) -> None:
        """Make the output what it is before a run: nothing."""

    def run(self) -> None:
        self.make(self.inputs, self.folder / "out")

    def make(self, inputs: list[Path], output: Path) -> None:
        make_dataset(
            inputs,
            self.tokenizer,
            output,
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

    def torn(self) -> bool:
        """Whether a killed run left a dataset that is not the whole one."""
        listed = (self.folder / "out" / "manifest.json").exists()
        return listed and self.whole != visible(self.folder / "out")

    def check(self, what: str) -> None:
        """Rerun after a kill, compare with the undisturbed run, say so."""
        torn = self.torn()
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

    def every(self, stride: int = 1) -> None:
        """Kill at operation 0, 1, 2, ... (or in greater strides) until a run gets through."""
        at = 0
        while True:
            self.begin()
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
            at += stride

    def random(self, seed: int, count: int) -> None:
        """Kill at random times of the run, from outside."""
        moments = random.Random(seed)
        for _ in range(count):
            self.begin()
            after = moments.uniform(0, self.seconds)
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                try:
                    # ends it as SIGKILL would
                    signal.setitimer(signal.ITIMER_REAL, max(after, 1e-4))
                    with faults(-1, kill):
                        self.run()
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            self.check(f"after {after:.4f} s")


class AddLoop(Loop):
    """Attempts to add all inputs but the first to a dataset of the first."""

    def __init__(self, folder: Path, tokenizer: Path, options: dict[str, Any]) -> None:
        self.base = folder / "base"
        first = sorted(folder.glob("*.jsonl"))[:1]
        self.tokenizer, self.options = tokenizer, options
        assert forked(lambda: self.make(first, self.base)) == 0
        self.before = digests(self.base)
        super().__init__(folder, tokenizer, options)

    def begin(self) -> None:
        shutil.copytree(self.base, self.folder / "out")

    def run(self) -> None:
        add_to(self.folder / "out", *self.inputs[1:], max_bad="100%")

    def torn(self) -> bool:
        """Whether it is neither the old version, byte for byte, nor the new one."""
        found = visible(self.folder / "out")
        replaced = ("manifest.json", "validation/manifest.json", "job.json")
        kept = {name: value for name, value in self.before.items() if name not in replaced}
        return not kept.items() <= found.items() or not all(
            found[name] in (self.before[name], self.whole[name]) for name in replaced[:2]
        )


def visible(folder: Path) -> dict[str, str]:
    """Return the digests of what a killed run left, but of its lock and its own scratch folders."""
    return {
        name: value
        for name, value in digests(folder).items()
        if not name.startswith((".", "dedup/")) and "/." not in name
    }


if __name__ == "__main__":
    assert tokenizers.Tokenizer is not None  # imported here, and below pandas, not in each fork
    pa.array([0])
    mode, *numbers = sys.argv[3:]
    count = {"every": 0, "add": 1, "random": 2}[mode]
    more = json.loads(numbers[count]) if len(numbers) > count else {}
    kind = AddLoop if mode == "add" else Loop
    loop = kind(Path(sys.argv[1]), Path(sys.argv[2]), more)
    if mode == "random":
        loop.random(*map(int, numbers[:2]))
    else:
        loop.every(*map(int, numbers[:count]))
