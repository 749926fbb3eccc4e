"""What a loader is, the data every loader is given, and the program each one runs as.

    driver: Task -> task.json -> `python -m peers.loaders.<name> task.json` in its environment
        worker -> "ready" with what one whole pass handed out      (this pass also warms the cache)
        driver -> a line, worker -> seconds and tokens of one pass          (round after round)

The data is one stream of documents, each ending in EOS: `stream.bin` (headerless uint16) and
`ends.npy` (int64, cumulative). Row r is the window of S + 1 tokens from r * S on.

This file is imported in the peers' environments too, so it needs the standard library and NumPy
only. Never: know a particular loader, or time its start-up.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from peers.harness import SavedTask, Tool, task_of_command_line

VOCAB_SIZE = 50_257
EOS = 50_256  # the last token of each document, and of nothing else


@dataclass(frozen=True, kw_only=True)
class Task(SavedTask):
    """One loader's task.

    Attributes:
        folder: where the data lies.
        scratch: empty folder for the loader's own copies and caches.
        sequence_length: S.
        batch: rows of a batch.
        rows: rows of the stream, a multiple of `batch`.
        option: which of a module's loaders to run.
    """

    folder: str
    scratch: str
    sequence_length: int
    batch: int
    rows: int
    option: str

    @property
    def stream(self) -> np.ndarray:
        """The memory map of all tokens, uint16 [rows * S + 1]."""
        return np.memmap(f"{self.folder}/stream.bin", np.uint16, "r")

    @property
    def ends(self) -> np.ndarray:
        """Where documents end, int64, cumulative."""
        return np.load(f"{self.folder}/ends.npy", allow_pickle=False)


@dataclass(frozen=True, kw_only=True)
class Loader(Tool):
    """A loader to measure.

    Attributes:
        module: the program, `peers.loaders.<module>`.
        option: which of the module's loaders.
        same_rows: a pass is each row of the stream once; else windows of its own.
        gives: what a batch holds.
    """

    module: str
    option: str = ""
    same_rows: bool = True
    gives: str


@dataclass(frozen=True, kw_only=True)
class Pass:
    """How a module's loader hands out rows.

    Attributes:
        batches: begins a pass; yields batches as a user of the loader gets them.
        ids: the input ids of a batch, integers [b, S].
    """

    batches: Callable[[], Iterator[Any]]
    ids: Callable[[Any], Any]


def digest_of_rows(ids: np.ndarray) -> int:
    """Return a number that depends on which rows `ids` [b, S] holds and not on their order."""
    rows = np.ascontiguousarray(ids).astype(np.uint16)
    return sum(zlib.crc32(row.tobytes()) for row in rows)


def serve(make: Callable[[Task], Pass]) -> None:
    """Be a loader's program: prepare, make one checked pass, then time a pass for each line."""
    task = task_of_command_line(Task)
    # what a loader prints by itself must not get between the answers
    answers, sys.stdout = sys.stdout, sys.stderr
    loader = make(task)
    rows = digest = 0
    for batch in loader.batches():
        ids = np.asarray(loader.ids(batch))
        rows, digest = rows + len(ids), digest + digest_of_rows(ids)
    print(json.dumps({"rows": rows, "digest": digest}), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(timed(loader, task)), file=answers, flush=True)


def timed(loader: Pass, task: Task) -> dict[str, float]:
    """Return the seconds from the first batch of a pass to its last, and the tokens between."""
    batches = loader.batches()
    next(batches)
    count, begun = 0, time.perf_counter()
    for _ in batches:
        count += 1
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "tokens": count * task.batch * task.sequence_length}
