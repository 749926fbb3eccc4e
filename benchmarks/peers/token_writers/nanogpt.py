"""In the style of nanoGPT: `datasets.load_dataset`, `map` with tiktoken, then one memmap.

`map` runs in `workers` processes, one document at a time as there; the ids are then copied from its
cache files into train.bin in 1,024 slices. Its cache is counted as temporary bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from peers.harness import task_of_command_line
from peers.token_writers.base import Part, Peer, Task, cut_at_eos, module_command

SLICES = 1024


def read(output: Path, task: Task) -> Iterator[Part]:
    """Yield train.bin as one part; it has no document ends, so it is cut after each EOS."""
    yield cut_at_eos(np.fromfile(output / "train.bin", task.dtype), task.eos)


PEERS = [
    Peer(
        name="nanogpt-style",
        package="datasets",
        installs=(("datasets", "tiktoken", "numpy", "zstandard"),),
        formats=("jsonl.zst", "jsonl", "parquet"),
        command=module_command("peers.token_writers.nanogpt"),
        read=read,
        lacks="no ends, digests, ids, origins, accounts, fsync; keeps two copies in its cache",
    )
]


def main() -> None:
    """Load, encode and concatenate."""
    from datasets import load_dataset

    from peers.token_writers.bpe import tiktoken_encoding

    task = task_of_command_line(Task)
    encoding = tiktoken_encoding(task.tokenizer)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        ids = encoding.encode_ordinary(row["text"])
        ids.append(task.eos)
        return {"ids": ids, "len": len(ids)}

    kind = "parquet" if task.inputs[0].endswith(".parquet") else "json"
    data = load_dataset(kind, data_files=task.inputs, split="train", num_proc=task.workers)
    data = data.map(encode, remove_columns=data.column_names, num_proc=task.workers)
    total = int(np.sum(data["len"], dtype=np.int64))
    stream = np.memmap(f"{task.output}/train.bin", task.dtype, "w+", shape=(total,))
    slices, position = min(SLICES, len(data)), 0
    for index in range(slices):
        rows = data.shard(num_shards=slices, index=index, contiguous=True).with_format("numpy")
        ids = np.concatenate(rows["ids"][:])
        stream[position : position + len(ids)] = ids
        position += len(ids)
    stream.flush()


if __name__ == "__main__":
    main()
