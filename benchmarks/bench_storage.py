"""Publish, read and list at a store, whatever keeps it: seconds, and those of CPU in this process.

    python benchmarks/bench_storage.py s3://BUCKET/PREFIX [gs://... az://... FOLDER] [--rounds 5]

Runs on any checkout that has `olm_data.storage.store`, so that two can be compared side by side.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time

from olm_data.storage.store import Store

LARGE, SMALL, FILES, RANGES = 64 << 20, 1000, 100, 200


def measure(url: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Return median seconds, of the clock and of CPU, by operation; what is written is removed."""
    store = Store(f"{url.rstrip('/')}/bench-{uuid.uuid4().hex[:8]}")
    seconds: dict[str, list[tuple[float, float]]] = {}

    def timed(name: str, action: Callable[[], object]) -> None:
        begun = perf_counter(), process_time()
        action()
        took = perf_counter() - begun[0], process_time() - begun[1]
        seconds.setdefault(name, []).append(took)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large"
        data = os.urandom(LARGE)
        sha256 = hashlib.sha256(data).hexdigest()
        store.put("warm", b"x")
        for _ in range(rounds):
            with store.staging() as staging:
                path = staging / "large"
                path.write_bytes(data)
                timed("publish 64 MiB", lambda path=path: store.publish("large", path, sha256))
            timed("read 64 MiB", lambda: store.read("large"))
            timed(
                "200 ranges of 4 KiB",
                lambda: [store.read("large", n << 12, (n + 1) << 12) for n in range(RANGES)],
            )
            timed(
                "put 100 of 1 kB",
                lambda: [store.put(f"small/{n}", bytes(SMALL)) for n in range(FILES)],
            )
            timed("list 100", lambda: store.child("small").entries())
            timed(
                "create 20",
                lambda: [store.create(f"made/{uuid.uuid4().hex}", b"x") for _ in range(20)],
            )
    store.clear()
    return {
        name: (statistics.median(t[0] for t in times), statistics.median(t[1] for t in times))
        for name, times in seconds.items()
    }


def main() -> None:
    """Print a row for each store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for url in options.stores:
        found = measure(url, options.rounds)
        print(url)
        for name, (clock, cpu) in found.items():
            print(f"  {name}: {1000 * clock:.0f} ms, {1000 * cpu:.0f} ms of CPU")


if __name__ == "__main__":
    main()
