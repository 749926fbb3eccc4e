"""`bench_loader.py --peers`: every loader over the same rows, in one run, one table.

Each loader is a process of its own that first makes one whole pass, checked, and then waits. Rounds
go over all loaders in turn: one answers while the others sleep. Time runs from the first batch of a
pass to its last, so nobody pays for starting a pass. Everything is one thread, one process, a warm
cache, no workers, no prefetch. The rows that a pass handed out are compared by a digest that does
not depend on their order.
"""

from __future__ import annotations

import argparse
import json
import selectors
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from peers import harness
from peers.environments import NotInstalled, last_line
from peers.loaders import bare, grain, litdata, megatron, mosaicml, olm, olmo_core
from peers.loaders.base import EOS, VOCAB_SIZE, Loader, Task, digest_of_rows
from peers.loaders.documents import documents

LOADERS: tuple[Loader, ...] = tuple(
    loader
    for module in (bare, olm, litdata, grain, megatron, mosaicml, olmo_core)
    for loader in module.LOADERS
)
SHARDS = 4
ROW = "{:28}{:>9}{:>10}{:>10}{:>12}{:>12}  {:11}{}"
HEADS = ("loader", "version", "best", "median", "x labels", "x fields", "rows", "gives")


class Failed(Exception):
    """A loader's program ended, or did not answer in time; the text says why."""


@dataclass
class Worker:
    """A loader's process, and what it answered."""

    loader: Loader
    version: str = ""
    failure: str = ""
    rows: str = ""
    speeds: list[float] = field(default_factory=list)  # million tokens a second, one a round
    process: subprocess.Popen[str] | None = None

    def start(self, python: Path, task: Task, place: Path) -> None:
        """Start the program; its errors go to `place`/log."""
        path = place / "task.json"
        task.save(path)
        surroundings = harness.surroundings(self.loader, Path(task.scratch))
        with (place / "log").open("w") as log:
            self.process = subprocess.Popen(
                [str(python), "-m", f"peers.loaders.{self.loader.module}", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=place,
                env=surroundings | {"OMP_NUM_THREADS": "1"},
            )

    def answer(self, place: Path, limit: float) -> dict[str, Any]:
        """Wait for the next answer.

        Raises:
            Failed: there is none within `limit` seconds.
        """
        assert self.process is not None
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if selector.select(limit) else None
        if line is None:
            raise Failed(f"no answer within {limit:.0f} s")
        if not line:
            raise Failed(last_line((place / "log").read_text(errors="replace")))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self) -> None:
        """Ask for one timed pass."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write("pass\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """End the program."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only --peers has."""
    harness.add_options(parser, "--loaders", LOADERS, 900.0)


def run_peers(options: argparse.Namespace) -> int:
    """Measure and print; return the exit code: 1 where a loader failed or read other rows."""
    workers = [Worker(loader) for loader in harness.chosen(options.loaders, LOADERS, "--loaders")]
    with tempfile.TemporaryDirectory(prefix="olm-loaders-") as folder:
        try:
            wanted, rows = make_data(Path(folder), options)
            prepare(workers, wanted, rows, Path(folder), options)
            measure(workers, Path(folder), options)
        finally:
            for worker in workers:
                worker.stop()
    show(workers)
    return 1 if any(worker.failure for worker in workers) else 0


def make_data(folder: Path, options: argparse.Namespace) -> tuple[int, int]:
    """Write the stream, its document ends, and ours; return the rows' digest and number."""
    from support.small_datasets import mix_datasets, write_dataset

    length, batch = options.sequence_length, options.batch
    rows = options.tokens // (length * batch) * batch
    rng = np.random.default_rng(0)
    stream = documents(rng, rows * length + 1, options.document)
    for document in stream:
        document[-1] = EOS
    shards = [stream[i::SHARDS] for i in range(SHARDS)]
    write_dataset(folder / "stream", shards, vocab_size=VOCAB_SIZE, eos=EOS)
    ordered = [document for shard in shards for document in shard]
    tokens = np.concatenate(ordered).astype(np.uint16)
    tokens.tofile(folder / "stream.bin")
    np.save(folder / "ends.npy", np.cumsum([len(document) for document in ordered]))
    stages = [(rows * length, {"stream": 1})]
    mix_datasets(folder, ["stream"], stages=stages, sequence_length=length)
    print(f"{rows:,} rows of {length:,} tokens in {len(stream):,} documents, batches of {batch}")
    return digest_of_rows(tokens[: rows * length].reshape(rows, length)), rows


def prepare(
    workers: list[Worker], wanted: int, rows: int, folder: Path, options: argparse.Namespace
) -> None:
    """Start every loader and check its first pass."""
    for worker in workers:
        loader, place = worker.loader, folder / worker.loader.name
        scratch = place / "scratch"
        scratch.mkdir(parents=True)
        task = Task(
            folder=str(folder),
            scratch=str(scratch),
            sequence_length=options.sequence_length,
            batch=options.batch,
            rows=rows,
            option=loader.option,
        )
        print(f"preparing {loader.name}", file=sys.stderr, flush=True)
        found = harness.ready(loader, options.peer_envs)
        if isinstance(found, NotInstalled):
            worker.failure = str(found)
            continue
        python, worker.version = found
        try:
            worker.start(python, task, place)
            answer = worker.answer(place, options.limit)
        except Failed as error:
            worker.failure = str(error)
            continue
        if not loader.same_rows:
            worker.rows = "its own"
        elif (answer["rows"], answer["digest"]) == (rows, wanted):
            worker.rows = "the same"
        else:
            worker.failure = f"handed out other rows: {answer['rows']:,}, not these {rows:,}"


def measure(workers: list[Worker], folder: Path, options: argparse.Namespace) -> None:
    """Time all loaders in turn, round by round."""
    for _ in range(options.rounds):
        for worker in workers:
            if worker.failure:
                continue
            try:
                worker.ask()
                answer = worker.answer(folder / worker.loader.name, options.limit)
                worker.speeds.append(answer["tokens"] / answer["seconds"] / 1e6)
            except (Failed, BrokenPipeError) as error:
                worker.failure = str(error)


def show(workers: list[Worker]) -> None:
    """Print one line a loader, the fastest first; ratios are medians over the rounds."""
    print("million tokens/s; x: how many times as fast ours is, ids and labels or all fields")
    print(ROW.format(*HEADS))
    done = [worker for worker in workers if not worker.failure]
    ours = {worker.loader.name: worker.speeds for worker in done}
    for worker in sorted(done, key=lambda worker: -statistics.median(worker.speeds)):
        ratios = [
            f"{statistics.median(map(float.__truediv__, ours[name], worker.speeds)):.2f}"
            if name in ours
            else "-"
            for name in ("olm-labels", "olm-fields")
        ]
        best, middle = max(worker.speeds), statistics.median(worker.speeds)
        print(
            ROW.format(
                worker.loader.name,
                worker.version,
                f"{best:.0f}",
                f"{middle:.0f}",
                *ratios,
                worker.rows,
                worker.loader.gives,
            )
        )
    for worker in workers:
        if worker.failure:
            print(f"{worker.loader.name:28}{worker.version:>9}  FAILED: {worker.failure}")
