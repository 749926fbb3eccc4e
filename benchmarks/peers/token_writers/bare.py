"""The bare loop: gigatoken's own `encode_files` in each process, then one write of the ids.

The least that turns these files into token files with this encoder; runs in our environment.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from peers.harness import task_of_command_line
from peers.token_writers.base import Part, Peer, Task, module_command, shares


def read(output: Path, task: Task) -> Iterator[Part]:
    """Yield one part a process."""
    for path in sorted(output.glob("*.ids")):
        yield np.fromfile(path, task.dtype), np.fromfile(path.with_suffix(".ends"), np.int64)


PEERS = [
    Peer(
        name="bare-gigatoken",
        package="gigatoken",
        formats=("jsonl.zst", "jsonl", "parquet"),
        command=module_command("peers.token_writers.bare"),
        read=read,
        lacks="no EOS, digests, ids, origins, accounts, resume, fsync; whole share in memory",
    )
]


def encode_share(rank: int, paths: list[str], task: Task) -> None:
    """Encode one process's files and write ids and document ends."""
    import gigatoken

    kinds = {
        ".parquet": gigatoken.ParquetFileSource,
        ".zst": gigatoken.JsonlFileSource,
        ".jsonl": gigatoken.JsonlFileSource,
    }
    source = kinds[Path(paths[0]).suffix]([*paths])
    layout = gigatoken.Tokenizer(task.tokenizer).encode_files(source, parallel=False).layout
    starts = np.asarray(layout.offsets.data, dtype=np.int64)
    ids = np.asarray(layout.content.data)[starts[0] : starts[-1]]
    ids.astype(task.dtype).tofile(Path(task.output, f"{rank:03d}.ids"))
    (starts[1:] - starts[0]).tofile(Path(task.output, f"{rank:03d}.ends"))


def main() -> None:
    """Run one process a share."""
    task = task_of_command_line(Task)
    deal = [(rank, paths, task) for rank, paths in enumerate(shares(task.inputs, task.workers))]
    with multiprocessing.get_context("spawn").Pool(len(deal)) as pool:
        pool.starmap(encode_share, deal)


if __name__ == "__main__":
    main()
