"""litdata's `optimize` into token chunks (TokensLoader), each document encoded with tiktoken.

Inputs are the files; each of the `workers` processes reads its files and yields one NumPy array of
ids a document, with chunks of 64 MiB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from peers.harness import task_of_command_line
from peers.token_writers.base import Part, Peer, Task, module_command

BLOCK = 2049  # tokens of a row when it is read back; has no effect on what is written
CHUNK_BYTES = 64 << 20


def read(output: Path, task: Task) -> Iterator[Part]:
    """Yield one part a chunk: u32 N, u32[N + 1] offsets of the items in the file, items."""
    index = json.loads((output / "index.json").read_text())
    for chunk in index["chunks"]:
        data = (output / chunk["filename"]).read_bytes()
        count = int.from_bytes(data[:4], "little")
        offsets = np.frombuffer(data, np.uint32, count + 1, offset=4).astype(np.int64)
        ids = np.frombuffer(data, task.dtype, offset=int(offsets[0]))
        yield ids, (offsets[1:] - offsets[0]) // task.dtype.itemsize


PEERS = [
    Peer(
        name="litdata",
        package="litdata",
        # named twice: its own dependencies otherwise replace torch by one with CUDA packages
        installs=(
            ("torch==2.13.0",),
            ("litdata", "tiktoken", "zstandard", "pyarrow", "torch==2.13.0"),
        ),
        formats=("jsonl.zst", "jsonl", "parquet"),
        command=module_command("peers.token_writers.litdata"),
        read=read,
        lacks="no digests, ids, origins, accounts, fsync",
    )
]


def encode_file(path: str, task: Task) -> Iterator[np.ndarray]:
    """Yield the ids of each document of one file, EOS last."""
    from peers.token_writers.bpe import tiktoken_encoding
    from peers.token_writers.texts import texts

    encoding = tiktoken_encoding(task.tokenizer)
    for text in texts(path):
        yield np.array([*encoding.encode_ordinary(text), task.eos], task.dtype)


def main() -> None:
    """Encode all files."""
    from litdata import TokensLoader, optimize

    task = task_of_command_line(Task)
    optimize(
        fn=partial(encode_file, task=task),
        inputs=task.inputs,
        output_dir=task.output,
        num_workers=task.workers,
        chunk_bytes=CHUNK_BYTES,
        item_loader=TokensLoader(block_size=BLOCK),
    )


if __name__ == "__main__":
    main()
