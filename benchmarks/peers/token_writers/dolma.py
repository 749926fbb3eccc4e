"""`dolma tokens`, the tokenizer of the Dolma toolkit, from its own command line.

Its options are the defaults. It takes files in random order and shuffles documents in batches.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from peers.token_writers.base import Part, Peer, Task


def command(python: Path, task: Task, path: Path) -> list[str]:
    """Return the command line of `dolma tokens`."""
    return [
        *(str(python.parent / "dolma"), "tokens", "--documents", *task.inputs),
        *("--destination", task.output, "--processes", str(task.workers)),
        *("--tokenizer.name_or_path", task.tokenizer, "--tokenizer.eos_token_id", str(task.eos)),
        *("--tokenizer.pad_token_id", str(task.eos), "--dtype", task.dtype.name),
    ]


def read(output: Path, task: Task) -> Iterator[Part]:
    """Yield one part a .npy file (which is raw ids); its ends are in the .csv.gz beside it."""
    for path in sorted(output.glob("*.npy")):
        with gzip.open(path.with_suffix("").with_suffix(".csv.gz"), "rt", newline="") as file:
            ends = [int(row[1]) for row in csv.reader(file)]
        if ends:
            yield np.fromfile(path, task.dtype), np.array(ends, np.int64)


PEERS = [
    Peer(
        name="dolma",
        package="dolma",
        # boto3: the one its s3fs pin leads to, which pip else looks for among hundreds for hours;
        # backports.zstd: without it every .zst file is an error line and an exit code of 0
        installs=(("dolma==1.2.1", "boto3==1.28.17", "backports.zstd"),),
        formats=("jsonl.zst", "jsonl"),
        command=command,
        read=read,
        lacks="no digests, accounts, resume, fsync; keeps ids and origins; shuffles within batches",
    )
]
