"""MosaicML streaming's MDSWriter, one a process, each document encoded with tiktoken.

Each of the `workers` processes writes a folder of its own; their indexes are merged at the end.
Documents are one column of one array of ids, EOS last; hashes and compression stay off, as by
default. The package imports torchvision, which must be of the same build as torch: beside a torch
for CPUs only, the registry's torchvision fails to load, and this peer with it.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from peers.harness import task_of_command_line
from peers.token_writers.base import Part, Peer, Task, module_command, shares


def read(output: Path, task: Task) -> Iterator[Part]:
    """Yield one part a shard: u32 N, u32[N + 1] offsets in the file, config, samples.

    A sample is its size (u32), a byte and a number for the array's shape, and the ids.
    """
    shards = json.loads((output / "index.json").read_text())["shards"]
    for shard in shards:
        data = (output / shard["raw_data"]["basename"]).read_bytes()
        count = int.from_bytes(data[:4], "little")
        offsets = np.frombuffer(data, np.uint32, count + 1, offset=4).tolist()
        documents = []
        for start, end in itertools.pairwise(offsets):
            head = 4 + 1 + (1 << (data[start + 4] & 3))  # the code's low bits: width of the shape
            documents.append(np.frombuffer(data[start + head : end], task.dtype))
        yield np.concatenate(documents), np.cumsum([len(d) for d in documents], dtype=np.int64)


PEERS = [
    Peer(
        name="mosaicml-mds",
        package="mosaicml-streaming",
        installs=(
            ("torch==2.13.0",),
            ("mosaicml-streaming", "tiktoken", "zstandard", "pyarrow", "torch==2.13.0"),
        ),
        formats=("jsonl.zst", "jsonl", "parquet"),
        command=module_command("peers.token_writers.mosaicml"),
        read=read,
        lacks="no ends beside the ids, digests, ids, origins, accounts, resume, fsync",
    )
]


def write_share(rank: int, paths: list[str], task: Task) -> None:
    """Encode one process's files into a folder of its own."""
    from streaming import MDSWriter

    from peers.token_writers.bpe import tiktoken_encoding
    from peers.token_writers.texts import texts

    encoding = tiktoken_encoding(task.tokenizer)
    columns = {"tokens": f"ndarray:{task.dtype.name}"}
    with MDSWriter(out=f"{task.output}/{rank:03d}", columns=columns) as writer:
        for path in paths:
            for text in texts(path):
                ids = np.array([*encoding.encode_ordinary(text), task.eos], task.dtype)
                writer.write({"tokens": ids})


def main() -> None:
    """Run one writer a process and merge their indexes."""
    from streaming.base.util import merge_index

    task = task_of_command_line(Task)
    deal = [(rank, paths, task) for rank, paths in enumerate(shares(task.inputs, task.workers))]
    with multiprocessing.get_context("spawn").Pool(len(deal)) as pool:
        pool.starmap(write_share, deal)
    merge_index(task.output, keep_local=True)


if __name__ == "__main__":
    main()
