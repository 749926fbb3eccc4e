"""What each tracker costs a step, its server absent from the machine or hanging.

    python benchmarks/bench_trackers.py --steps 80 --block 4

One run of the whole trainer for each case, one torch thread, metrics logged at every step. In every
second block of steps the tracker is fed, in the others not; so it is fed all steps in half of them,
which doubles what it costs there. Three numbers a case:

* wall: seconds of a block over those of the block beside it, median of the pairs and quartiles;
* in the step: CPU time that the training thread spends in the tracker's callback;
* beside it: CPU time of all other threads of the process, over that of blocks without feeding. What
  is done there takes cores or Python's lock from training, if they are not free.

"nothing" is a case without a tracker: its ratio says how far the noise goes. A server that hangs is
a socket that takes connections and says nothing. What a client does before its first step is fed,
imports above all, is not in the numbers but in the column "first".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_callbacks import make_mixture

from olm_data.config.values import Values
from olm_train.callbacks.base import Callback
from olm_train.distributed.world import World
from olm_train.extensions.tracking.callback import TrackerCallback
from olm_train.extensions.tracking.feeder import TRACKING
from olm_train.run.config import RunConfig

OFFLINE = {"WANDB_MODE": "offline", "COMET_START_ONLINE": "0"}
ONLINE = {"WANDB_MODE": "online", "COMET_START_ONLINE": "1"}
ONLINE |= {"WANDB_API_KEY": "0123456789abcdef" * 3, "COMET_API_KEY": "k" * 25}
CASES: dict[str, tuple[str | None, bool]] = {
    "nothing": (None, False),
    "tensorboard": ("tensorboard", False),
    "trackio": ("trackio", False),
    "comet, archive": ("comet", False),
    "wandb, offline": ("wandb", False),
    "comet, server hangs": ("comet", True),
    "wandb, server hangs": ("wandb", True),
}
"""Tracker, and whether its server hangs. W&B's client keeps its first mode: one case a process."""
LONGEST_WAIT = 120.0


@dataclass(kw_only=True)
class Switch(Callback):
    """Feeds a tracker in every second block of steps, and keeps what each step took."""

    tracker: TrackerCallback | None
    block: int
    hangs: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.marks: list[tuple[float, float, float]] = []
        self.inside: list[float] = []
        self.on = False
        self.first = 0.0
        if self.tracker is not None:
            feed = self.tracker.log_metrics

            def log_metrics(step: int, metrics: Mapping[str, float]) -> None:
                if self.on:
                    before = time.thread_time()
                    feed(step, metrics)
                    self.inside.append(time.thread_time() - before)

            self.tracker.log_metrics = log_metrics  # type: ignore[method-assign]

    def pre_train(self) -> None:
        begin = time.monotonic()
        while self.tracker is not None and not self.hangs and not self._is_open():
            time.sleep(0.05)
            assert time.monotonic() - begin < LONGEST_WAIT, "the tracker does not open"
        if self.hangs:
            time.sleep(20)  # imports; then it waits for its server
        self.first = time.monotonic() - begin

    def pre_load_batch(self) -> None:
        self.on = len(self.marks) // self.block % 2 == 1
        self.marks.append((time.perf_counter(), time.thread_time(), time.process_time()))

    def _is_open(self) -> bool:
        path = self.trainer.work_dir / TRACKING
        return path.exists() and bool(json.loads(path.read_text())["trackers"])

    def blocks(self, which: str) -> Iterator[tuple[float, float]]:
        """Yield seconds of each block without feeding and of the next one with it."""
        numbers = [
            {"wall": wall, "thread": thread, "others": process - thread}[which]
            for wall, thread, process in self.marks[self.block :: self.block]  # the first warms up
        ]
        spans = [after - before for before, after in pairwise(numbers)]
        yield from zip(spans[1::2], spans[2::2], strict=False)


@contextlib.contextmanager
def silence() -> Iterator[str]:
    """Yield the address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def measure(args: argparse.Namespace, lock: Path, name: str | None, hangs: bool) -> Switch:
    """Run a case."""
    with tempfile.TemporaryDirectory(dir=lock.parent) as folder, silence() as url:
        os.environ |= {"WANDB_BASE_URL": url, "COMET_URL_OVERRIDE": f"{url}/clientlib/"}
        os.environ |= (ONLINE if hangs else OFFLINE) | {"TRACKIO_DIR": folder}
        callbacks: dict[str, Any] = {"checkpointer": {"enabled": False}}
        callbacks |= {"console_logger": {"enabled": False}} | ({name: {}} if name else {})
        values = {
            "model": {"d_model": args.width, "n_layers": args.layers, "n_heads": 4},
            "data_loader": {"mixture": str(lock), "global_batch_size": args.tokens},
            "train_module": {"rank_microbatch_size": args.tokens},
            "trainer": {
                "save_folder": f"{folder}/run",
                "metrics_collect_interval": 1,
                "hard_stop": {"value": args.steps, "unit": "steps"},
                "callbacks": callbacks,
            },
        }
        trainer = RunConfig.resolve(Values(values)).build(World())
        tracker = trainer.callbacks[name] if name else None
        assert tracker is None or isinstance(tracker, TrackerCallback)
        switch = Switch(tracker=tracker, block=args.block, hangs=hangs)
        if tracker is not None:
            tracker.limits = type(tracker.limits)(close=5.0)
        trainer.add_callback("switch", switch)
        trainer.fit()
        return switch


def line(title: str, switch: Switch, block: int) -> str:
    """Return a row of the table."""
    wall = list(switch.blocks("wall"))
    ratios = statistics.quantiles([on / off for off, on in wall], n=4)
    step = statistics.median(off for off, _ in wall) / block
    inside = statistics.mean(switch.inside) if switch.inside else 0.0
    others = statistics.median(on - off for off, on in switch.blocks("others")) / block
    cells = (
        title,
        f"{step * 1e3:.0f} ms",
        f"{ratios[1]:.3f} ({ratios[0]:.3f} to {ratios[2]:.3f})",
        f"{inside * 1e6:.0f} µs, {inside / step:.3%}",
        f"{others * 1e3:.2f} ms, {others / step:.2%}",
        f"{switch.first:.1f} s",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="in a step")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--only", help="part of the names to measure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        lock = make_mixture(Path(folder))
        print("| tracker | step | wall, fed / not | in the step | beside it | first |")
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
        for title, (name, hangs) in CASES.items():
            if args.only and args.only not in title:
                continue
            if (child := os.fork()) == 0:  # clients keep state in the process
                print(line(title, measure(args, lock, name, hangs), args.block), flush=True)
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                raise SystemExit(f"{title} failed")


if __name__ == "__main__":
    main()
