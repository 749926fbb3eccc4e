"""Publish, read and list: seconds at a store, whatever keeps it.

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
from time import perf_counter

from olm_data.storage.store import Store

LARGE, SMALL, FILES, RANGES = 64 << 20, 1000, 100, 200


def measure(url: str, rounds: int) -> dict[str, float]:
    """Return median seconds by operation; everything written is removed."""
    store = Store(f"{url.rstrip('/')}/bench-{uuid.uuid4().hex[:8]}")
    seconds: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], object]) -> None:
        begun = perf_counter()
        action()
        seconds.setdefault(name, []).append(perf_counter() - begun)

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
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    """Print a row for each store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for url in options.stores:
        found = measure(url, options.rounds)
        print(url, " | ".join(f"{name}: {1000 * t:.0f} ms" for name, t in found.items()))


if __name__ == "__main__":
    main()
