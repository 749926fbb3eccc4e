"""Start-up and index cost of mixtures up to 10^13 tokens, 10^5 shards, 1,000 sources, 10^4 ranks.

Datasets are sparse: real manifests, records and document ends, tokens that are holes. Start-up is
measured in a fresh process, from the import to the first batch; memory is the peak of resident
memory above the idle interpreter with NumPy. Ranks are simulated one after the other in this
process: each takes its slice of a step as `DataLoader` would, and all slices together must be the
step, each row of each source once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
WEIGHTS = (4, 3, 2, 1)  # of the sources, in turn
RANKS = 10_000
AHEAD = 8192  # rows located at once, as `DataLoader` does
COMPARED = (0, 1, 4_999, 9_999)  # ranks whose real loader is asked what it reads

# VmHWM, as ru_maxrss would start from the peak of the process that started this one
START_UP = """
import sys, time
import numpy as np
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
idle = peak()
begun, spent = time.perf_counter(), time.process_time()
from olm_data.rows.reader import RowReader
imported = time.perf_counter()
reader = RowReader(sys.argv[1])
opened = time.perf_counter()
batch = reader.read(np.arange(int(sys.argv[2])))
done = time.perf_counter()
assert batch.labels.shape[0] == int(sys.argv[2])
print(imported - begun, opened - imported, done - opened, peak() - idle, end="\\t")
print(time.process_time() - spent)
"""

# What no reader can go below: each manifest read, hashed and parsed once.
LIMIT = """
import hashlib, pathlib, sys, time
import msgspec
spent = time.process_time()
for place in pathlib.Path(sys.argv[1]).parent.glob("source-*/manifest.json"):
    data = place.read_bytes()
    hashlib.sha256(data).hexdigest()
    msgspec.json.decode(data)
print(time.process_time() - spent)
"""


@dataclass(frozen=True)
class Size:
    """A mixture to start: shards and tokens over all of its sources."""

    tokens: int
    shards: int
    sources: int


SIZES = (
    Size(10**8, 100, 4),
    Size(10**10, 1_000, 4),
    Size(10**13, 100_000, 4),
    Size(10**13, 100_000, 1_000),
)


def measure_sizes(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what each size costs; the largest one is also read by `RANKS` ranks."""
    for size in SIZES:
        with tempfile.TemporaryDirectory(prefix="olm-bench-") as name:
            lock, manifests = write(Path(name), size, options)
            runs = [start(lock, options.batch) for _ in range(1 if options.quick else 5)]
            imported, opened, first, megabytes, _ = min(runs, key=lambda run: sum(run[:3]))
            limits = [fresh(LIMIT, str(lock))[0] for _ in runs]
            result = {
                "tokens": size.tokens,
                "shards": size.shards,
                "sources": size.sources,
                "manifest_megabytes": manifests / 1e6,
                "import_seconds": imported,
                "open_seconds": opened,
                "first_batch_seconds": first,
                "peak_megabytes": megabytes,
                "cpu_seconds": min(run[4] for run in runs),
                "limit_cpu_seconds": min(limits),
            }
            if size is SIZES[-1]:
                result |= by_ranks(lock, options)
            yield result


def write(folder: Path, size: Size, options: argparse.Namespace) -> tuple[Path, int]:
    """Write the datasets and the lock; return the lock and the bytes of all manifests."""
    from support.small_datasets import mix_datasets, write_sparse_dataset

    names = [f"source-{i:04d}" for i in range(size.sources)]
    each = size.tokens // size.shards
    for name in names:
        write_sparse_dataset(
            folder / name,
            shards=size.shards // size.sources,
            tokens=each,
            documents=max(1, each // options.document),
        )
    weights = {name: WEIGHTS[i % len(WEIGHTS)] for i, name in enumerate(names)}
    lock = mix_datasets(
        folder,
        names,
        stages=[(size.tokens, weights)],
        sequence_length=options.sequence_length,
    )
    return lock, sum((folder / name / "manifest.json").stat().st_size for name in names)


def start(lock: Path, batch: int) -> list[float]:
    """Return seconds (import, open, first batch), megabytes and CPU seconds of a process."""
    return fresh(START_UP, str(lock), str(batch))


def fresh(script: str, *words: str) -> list[float]:
    """Return the numbers that a script prints in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(value) for value in done.stdout.split()]


def by_ranks(lock: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return what the order costs `RANKS` ranks, having checked that they share one step."""
    from olm_data.mixture.lock import Lock
    from olm_data.rows.reader import RowReader
    from olm_train.data import DataLoader

    opened, batch = Lock.read(lock), options.batch
    size = batch * options.sequence_length
    sizes = {"global_batch_size": RANKS * size, "rank_microbatch_size": size}
    whole = DataLoader(opened, world_size=RANKS, prefetch=0, **sizes)
    step = whole.rows_of_step(whole.steps // 2)
    reader = RowReader(opened)
    places, begun = [], time.perf_counter()
    for rank in range(RANKS):
        place = reader.schedule.locate(step[rank * batch : (rank + 1) * batch])
        places.append(np.stack([place.source.astype(np.int64), place.epoch, place.row]))
    alone = (time.perf_counter() - begun) / RANKS
    distinct = np.unique(np.concatenate(places, axis=1), axis=1)
    assert distinct.shape[1] == len(step) == RANKS * batch, "two ranks read the same row"
    for rank in COMPARED:
        with DataLoader(opened, rank=rank, world_size=RANKS, prefetch=0, **sizes) as loader:
            first = next(iter(loader))[0].rows.numpy()
        assert (first == rank * batch + np.arange(batch)).all(), "a loader reads another slice"
    each = np.arange(batch)
    costs = []
    for rank in range(0, RANKS, RANKS // 50):  # the steps that a rank locates at once
        first = (np.arange(AHEAD // batch) * RANKS + rank) * batch
        rows = (first[:, None] + each).reshape(-1)
        begun = time.perf_counter()
        reader.prepare(rows)
        costs.append((time.perf_counter() - begun) / len(first))
    return {
        "ranks": RANKS,
        "alone_microseconds": alone * 1e6,
        "index_microseconds": float(np.median(costs)) * 1e6,
    }


def show(results: list[dict[str, Any]]) -> None:
    """Print a line a size."""
    for size in results:
        total = sum(size[f"{part}_seconds"] for part in ("import", "open", "first_batch"))
        print(
            f"start-up {size['tokens']:.0e} tokens, {size['shards']:,} shards, "
            f"{size['sources']:,} sources, manifests "
            f"{size['manifest_megabytes']:.1f} MB: {total:.2f} s "
            f"(import {size['import_seconds']:.2f}, open {size['open_seconds']:.2f}, first batch "
            f"{size['first_batch_seconds']:.2f}), {size['peak_megabytes']:.0f} MB above idle; "
            f"{size['cpu_seconds']:.2f} CPU s, of which reading, hashing and parsing the manifests "
            f"once takes {size['limit_cpu_seconds']:.2f}"
        )
        if "ranks" in size:
            print(
                f"  {size['ranks']:,} ranks share a step, each row once; index cost of a batch: "
                f"{size['index_microseconds']:.0f} us as the loader locates ahead, "
                f"{size['alone_microseconds']:.0f} us for one batch alone"
            )
