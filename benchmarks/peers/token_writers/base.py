"""What a peer is, and the task that every peer is given.

    driver: Task -> task.json -> `python -m peers.token_writers.<name> task.json`, its environment
    peer's output folder -> Peer.read -> parts of (ids, ends) -> compare

This file is imported in the peers' environments too, so it needs the standard library and NumPy
only. Never: measure anything, or know a particular tool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from peers.harness import SavedTask, Tool

Part = tuple[np.ndarray, np.ndarray]  # ids [n], ends int64 [documents], cumulative, last one n


@dataclass(frozen=True, kw_only=True)
class Task(SavedTask):
    """One run of one peer.

    Attributes:
        inputs: files of documents with the fields `id` and `text`, in the peer's format.
        tokenizer: path of a tokenizer.json.
        output: empty folder for what the peer makes.
        scratch: empty folder for its temporary files and caches.
        workers: processes.
        eos, eos_text: the token after each document.
        vocab_size: every id is below it.
    """

    inputs: list[str]
    tokenizer: str
    output: str
    scratch: str
    workers: int
    eos: int
    eos_text: str
    vocab_size: int

    @property
    def dtype(self) -> np.dtype:
        """The narrowest dtype that peers use for these ids."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)


@dataclass(frozen=True, kw_only=True)
class Peer(Tool):
    """A tool that turns text into token files.

    Attributes:
        formats: input formats it takes, the best first.
        command: the command line, from the Python of its environment and the path of the task.
        read: the documents of an output folder, in stored order.
        lacks: what it does not do that ours does, or what the figures leave out.
    """

    formats: tuple[str, ...]
    command: Callable[[Path, Task, Path], list[str]]
    read: Callable[[Path, Task], Iterator[Part]]
    lacks: str


def module_command(module: str) -> Callable[[Path, Task, Path], list[str]]:
    """Return a Peer.command that runs `python -m module task.json`."""
    return lambda python, task, path: [str(python), "-m", module, str(path)]


def cut_at_eos(ids: np.ndarray, eos: int) -> Part:
    """Return a stream as one part whose documents end after each EOS."""
    ends = np.flatnonzero(ids == eos).astype(np.int64) + 1
    if len(ids) and (not len(ends) or ends[-1] != len(ids)):
        ends = np.append(ends, len(ids))
    return ids, ends


def shares(items: list[str], workers: int) -> list[list[str]]:
    """Deal items to workers in turn; no empty shares."""
    return [items[k::workers] for k in range(min(workers, len(items)))]
