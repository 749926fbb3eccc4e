"""How long does `olm-train watch` take to read a log at its start?

    python benchmarks/bench_watch.py                    # 100,000 steps of 15 metrics

CPU seconds of all that a page needs of `metrics.jsonl`, beside those of `json.loads` of each line
of the same file in the same process; the least of some rounds that take turns. With `--odd N` every
N-th step has a metric more, so that neighbouring lines have other names.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from olm_data.extensions.report.run_view import RunView

METRICS = (
    "train/CE loss", "train/PPL", "optim/lr", "optim/total grad norm", "optim/clipped",
    "throughput/tokens per second", "throughput/data wait share", "throughput/MFU", "train/tokens",
    "optim/step skipped", "throughput/step seconds", "gpu/reserved", "gpu/active", "a", "b",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--odd", type=int, default=0, help="every N-th step has a metric more")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="olm-bench-") as name:
        path = Path(name) / "metrics.jsonl"
        write(path, options.steps, options.odd)
        jobs: dict[str, Callable[[], None]] = {
            "json.loads": lambda: plain(path),
            "watch": lambda: RunView(Path(name), "run").read_all(),
        }
        best = dict.fromkeys(jobs, float("inf"))
        for _ in range(options.rounds):
            for job, run in jobs.items():
                before = time.process_time()
                run()
                best[job] = min(best[job], time.process_time() - before)
        size = path.stat().st_size / 1e6
    print(f"{options.steps:,} lines, {size:.0f} MB; CPU seconds, least of {options.rounds}")
    for job, seconds in best.items():
        print(f"{job:12} {seconds:6.2f} s  {seconds / best['json.loads']:6.3f} of json.loads")


def write(path: Path, steps: int, odd: int) -> None:
    draw = random.Random(1)
    with path.open("w") as file:
        for step in range(1, steps + 1):
            line = {
                "step": step,
                "time": 1767225600.0 + 0.37 * step,
                "tokens": 512 * step,
                "rows": [8 * step - 8, 8 * step],
                "order": f"{draw.getrandbits(256):064x}",
                **{metric: 10 * draw.random() for metric in METRICS},
            }
            if odd and step % odd == 0:
                line["more"] = draw.random()
            file.write(json.dumps(line) + "\n")


def plain(path: Path) -> None:
    with path.open("rb") as file:
        for line in file:
            json.loads(line)


if __name__ == "__main__":
    main()
