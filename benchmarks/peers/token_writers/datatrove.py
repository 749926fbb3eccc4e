"""datatrove's DocumentTokenizer behind its JSONL or parquet reader and its local executor.

One task a process; documents are not shuffled, which spares it a second pass over the ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from peers.harness import task_of_command_line
from peers.token_writers.base import Part, Peer, Task, module_command


def read(output: Path, task: Task) -> Iterator[Part]:
    """Yield one part a .ds file; its document ends are in the .ds.index beside it."""
    for path in sorted(output.glob("*.ds")):
        ends = np.fromfile(path.with_name(path.name + ".index"), np.uint64)
        yield np.fromfile(path, task.dtype), ends.astype(np.int64)


PEERS = [
    Peer(
        name="datatrove",
        package="datatrove",
        installs=(("datatrove[io,processing]", "zstandard"),),
        formats=("jsonl.zst", "jsonl", "parquet"),
        command=module_command("peers.token_writers.datatrove"),
        read=read,
        lacks="no digests, ids, origins, fsync; resumes by whole task; shuffling switched off",
    )
]


def main() -> None:
    """Run reader and tokenizer in `workers` processes."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader, ParquetReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    task = task_of_command_line(Task)
    reader = ParquetReader if task.inputs[0].endswith(".parquet") else JsonlReader
    LocalPipelineExecutor(
        pipeline=[
            reader(str(Path(task.inputs[0]).parent)),
            DocumentTokenizer(
                task.output,
                task.tokenizer,
                eos_token=task.eos_text,
                shuffle_documents=False,
            ),
        ],
        tasks=task.workers,
        workers=task.workers,
        logging_dir=f"{task.scratch}/logs",
    ).run()


if __name__ == "__main__":
    main()
