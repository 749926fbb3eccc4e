"""The method of Megatron's preprocessing script: a pool over JSON lines, one indexed writer.

The script itself is in no package, so the method is written out here: processes each encode one
line at a time with Hugging Face `tokenizers` and an EOD, chunks of 32 lines; the parent appends ids
to one .bin and writes the .idx last. The parent reads and writes, the pool encodes.
"""

from __future__ import annotations

import json
import multiprocessing
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from peers.harness import task_of_command_line
from peers.token_writers.base import Part, Peer, Task, module_command

CODES = {"uint16": 8, "int32": 4}  # the format's numbers for dtypes; it has no uint32


def read(output: Path, task: Task) -> Iterator[Part]:
    """Yield the .bin as one part; lengths are in the .idx."""
    index = (output / "text.idx").read_bytes()
    if index[:9] != b"MMIDIDX\x00\x00":
        raise ValueError("not an .idx file")
    code, sequences = index[17], int.from_bytes(index[18:26], "little")
    name = {number: name for name, number in CODES.items()}[code]
    lengths = np.frombuffer(index, "<i4", sequences, offset=34)
    yield np.fromfile(output / "text.bin", name), np.cumsum(lengths, dtype=np.int64)


PEERS = [
    Peer(
        name="megatron-method",
        package="tokenizers",
        installs=(("tokenizers", "numpy"),),
        formats=("jsonl",),
        command=module_command("peers.token_writers.megatron"),
        read=read,
        lacks="no digests, ids, origins, accounts, resume, fsync; written out here, not the script",
    )
]


class Encode:
    """Encodes lines in a process of the pool; the tokenizer is loaded once a process."""

    tokenizer: Any = None
    eos = 0

    @classmethod
    def start(cls, path: str, eos: int) -> None:
        """Load the tokenizer."""
        from tokenizers import Tokenizer

        cls.tokenizer, cls.eos = Tokenizer.from_file(path), eos

    @classmethod
    def line(cls, line: str) -> list[int]:
        """Return the ids of one JSON line, EOD last."""
        text = json.loads(line)["text"]
        return [*cls.tokenizer.encode(text, add_special_tokens=False).ids, cls.eos]


def lines(paths: list[str]) -> Iterator[str]:
    """Yield all lines of all files."""
    for path in paths:
        with open(path, encoding="utf-8") as file:
            yield from file


def main() -> None:
    """Encode all lines in order and write text.bin and text.idx."""
    task = task_of_command_line(Task)
    dtype = np.dtype(np.uint16 if task.vocab_size < 65_500 else np.int32)
    lengths: list[int] = []
    with (
        multiprocessing.Pool(task.workers, Encode.start, (task.tokenizer, task.eos)) as pool,
        open(f"{task.output}/text.bin", "wb") as file,
    ):
        for ids in pool.imap(Encode.line, lines(task.inputs), 32):
            file.write(np.array(ids, dtype).tobytes())
            lengths.append(len(ids))
    sizes = np.array(lengths, np.int32)
    starts = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64)]) * dtype.itemsize
    with open(f"{task.output}/text.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, CODES[dtype.name]))
        file.write(struct.pack("<QQ", len(sizes), len(sizes) + 1))
        for values in (sizes, starts.astype(np.int64), np.arange(len(sizes) + 1)):
            file.write(values.tobytes())


if __name__ == "__main__":
    main()
