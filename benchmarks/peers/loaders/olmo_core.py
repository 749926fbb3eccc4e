"""OLMo-core's two data systems over the raw file: numpy (FSL) and composable.

Both hand out ids; labels are made later, in its train module. With document lengths it looks for
EOS in each row. The numpy loader keeps its default of reading rows in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from peers.loaders.base import EOS, VOCAB_SIZE, Loader, Pass, Task, serve

INSTALLS = (("torch==2.13.0",), ("ai2-olmo-core", "torch==2.13.0"))
LOADERS = [
    Loader(
        name=f"olmo-core-{system}{'-lengths' if lengths else ''}",
        module="olmo_core",
        option=f"{system}{' lengths' if lengths else ''}",
        package="ai2-olmo-core",
        environment="loader-olmo-core",
        installs=INSTALLS,
        gives="ids, document lengths" if lengths else "ids",
    )
    for system in ("numpy", "composable")
    for lengths in (False, True)
]


def make(task: Task) -> Pass:
    """Build one of the loaders over `stream.bin`."""
    import torch
    from olmo_core.data import DataCollator, TokenizerConfig

    torch.set_num_threads(1)
    system, _, lengths = task.option.partition(" ")
    tokenizer = TokenizerConfig(vocab_size=VOCAB_SIZE, eos_token_id=EOS, pad_token_id=EOS)
    collator = DataCollator(pad_token_id=EOS)
    build = {"numpy": numpy_loader, "composable": composable_loader}[system]
    loader = build(task, tokenizer, collator, bool(lengths))
    epoch = 0

    def batches() -> Iterator[Any]:
        nonlocal epoch
        epoch += 1
        loader.reshuffle(epoch)
        yield from loader
        loader.reset()

    return Pass(batches=batches, ids=lambda batch: batch["input_ids"])


def numpy_loader(task: Task, tokenizer: Any, collator: Any, lengths: bool) -> Any:
    """Return `NumpyFSLDataLoader` over `NumpyFSLDataset`."""
    from olmo_core.data import NumpyFSLDataset
    from olmo_core.data.data_loader import NumpyDataLoaderBase

    dataset = NumpyFSLDataset(
        f"{task.folder}/stream.bin",
        sequence_length=task.sequence_length,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        vocab_size=tokenizer.vocab_size,
        dtype=np.uint16,
        generate_doc_lengths=lengths,
        include_instance_metadata=False,
    )
    dataset.work_dir = task.scratch
    dataset.prepare()
    return NumpyDataLoaderBase.wrap_numpy_dataset(
        dataset,
        global_batch_size=task.batch * task.sequence_length,
        collator=collator,
        work_dir=task.scratch,
        num_threads=0,
    )


def composable_loader(task: Task, tokenizer: Any, collator: Any, lengths: bool) -> Any:
    """Return `ComposableDataLoader` over concatenated and chunked documents."""
    from olmo_core.data.composable import (
        ComposableDataLoader,
        ConcatAndChunkInstanceSource,
        NumpyDocumentSource,
    )

    documents = NumpyDocumentSource(
        source_paths=[f"{task.folder}/stream.bin"],
        dtype=np.uint16,
        work_dir=task.scratch,
        tokenizer=tokenizer,
    )
    rows = ConcatAndChunkInstanceSource(
        documents, sequence_length=task.sequence_length, work_dir=task.scratch
    )
    return ComposableDataLoader(
        rows,
        collator=collator,
        tokenizer=tokenizer,
        work_dir=task.scratch,
        global_batch_size=task.batch * task.sequence_length,
        num_threads=0,
        generate_doc_lengths=lengths,
        display_source_visualization=False,
    )


if __name__ == "__main__":
    serve(make)
