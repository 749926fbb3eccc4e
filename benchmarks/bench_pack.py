"""How long does planning rows take, and what do the rows cost?

    python benchmarks/bench_pack.py
    python benchmarks/bench_pack.py --documents 1e6 --lengths 1024,2048,8192 --loop-documents 1e5

Documents have lognormal lengths (a median of 400 tokens, as of web text, or `--median`). Plans them
in windows with the packers that `olm-data mix` uses, and, in the same run, with a loop that puts
one document at a time into the fullest row that has room (best-fit decreasing, a list of rows for
each room), on as many documents as `--loop-documents` says. Prints seconds of CPU time, best of the
rounds, padding, documents cut without need, and the most memory the process held.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from olm_data.packing.base import Int64, PackingCost
from olm_data.packing.packings import PACKINGS
from olm_data.packing.row_plan import WINDOW

DATASET: Any = SimpleNamespace(digest="0" * 64)


def plan(sizes: Int64, packing: str, length: int) -> PackingCost:
    """Plan all documents, window by window, and let the rows go."""
    cost, starts = PackingCost(), np.cumsum(sizes) - sizes
    windows = (
        (starts[low : low + WINDOW], sizes[low : low + WINDOW])
        for low in range(0, len(sizes), WINDOW)
    )
    for _ in PACKINGS[packing]().pack(DATASET, windows, length, cost):
        pass
    return cost


def one_by_one(sizes: list[int], length: int) -> tuple[int, int]:
    """Best-fit decreasing a document at a time; return rows, and pieces put into them.

    The tightest room is found by the lowest set bit of a number, as well as Python can.
    """
    pieces: list[tuple[int, int]] = []
    for document, size in enumerate(sizes):
        while size > length:
            pieces.append((length, document))
            size -= length
        pieces.append((size, document))
    pieces.sort(reverse=True)
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}
    rooms = 0
    for size, document in pieces:
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room]
                rooms &= ~(1 << room)
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(document)
        left = room - size
        if left:
            open_rows.setdefault(left, []).append(row)
            rooms |= 1 << left
    return len(rows), len(pieces)


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    """Measure and print one line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--documents", type=lambda text: int(float(text)), default=10_000_000)
    parser.add_argument("--loop-documents", type=lambda text: int(float(text)), default=1_000_000)
    parser.add_argument("--lengths", default="2048,8192,5000")
    parser.add_argument("--median", type=float, default=400, help="tokens of a document")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    sizes = np.maximum(1, rng.lognormal(np.log(args.median), 1.1, args.documents)).astype(np.int64)
    print(f"{args.documents:,} documents, {int(sizes.sum()):,} tokens, windows of {WINDOW:,}")
    for length in map(int, args.lengths.split(",")):
        taken = {}
        for packing in ("best_fit", "concat", "document"):
            rounds = []
            for _ in range(args.rounds):
                rounds.append(seconds(lambda p=packing, n=length: plan(sizes, p, n)))
            cost, taken[packing] = plan(sizes, packing, length), min(rounds)
            print(
                f"{packing:>9}, rows of {length:6,}: {min(rounds):6.2f} s, {cost.rows:11,} rows, "
                f"padding {cost.padding / (cost.rows * length):9.4%}, "
                f"cut without need {cost.cut_short:10,}, with {cost.cut_long:10,}"
            )
        some = sizes[: args.loop_documents].tolist()
        loop = seconds(lambda some=some, n=length: one_by_one(some, n))
        rows, _ = one_by_one(some, length)
        whole = loop * args.documents / max(len(some), 1)
        ours = plan(sizes[: args.loop_documents], "best_fit", length).rows
        print(
            f"     loop, rows of {length:6,}: {loop:6.2f} s for {len(some):,} documents, "
            f"{rows:,} rows (best_fit: {ours:,}); {whole:.1f} s for all at this rate, "
            f"{whole / taken['best_fit']:.0f} times best_fit"
        )
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"most memory held: {most / 1e6:,.0f} MB, of which lengths {sizes.nbytes / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
