"""Megatron-core's GPTDataset in a torch DataLoader, num_workers=0.

The stream is written as .bin and .idx with one sequence a document by the package's own builder.
GPTDataset shuffles documents before it cuts rows, so its rows are not those of the stream; they
hold as many tokens. Masks and position ids are its defaults: made once, not reset at documents.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from peers.loaders.base import EOS, VOCAB_SIZE, Loader, Pass, Task, serve

LOADERS = [
    Loader(
        name="megatron-core",
        module="megatron",
        package="megatron-core",
        environment="loader-megatron",
        installs=(("torch==2.13.0",), ("megatron-core", "torch==2.13.0")),
        same_rows=False,
        gives="ids, labels, loss mask, positions not reset; documents shuffled",
    )
]


def make(task: Task) -> Pass:
    """Write the indexed dataset, build all indexes, wrap them."""
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from megatron.core.datasets.utils import Split

    torch.set_num_threads(1)
    prefix = f"{task.scratch}/text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in np.split(np.asarray(task.stream), task.ends[:-1]):
        builder.add_item(torch.from_numpy(document.astype(np.int32)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    tokenizer = SimpleNamespace(
        vocab_size=VOCAB_SIZE, eod=EOS, pad=VOCAB_SIZE, unique_identifiers={"name": "benchmark"}
    )
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=task.sequence_length,
        blend=([prefix], None),
        split="1",
        path_to_cache=f"{task.scratch}/cache",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    indexed = GPTDataset.build_low_level_dataset(prefix, config)
    documents = np.arange(len(indexed), dtype=np.int32)
    dataset = GPTDataset(indexed, prefix, documents, None, Split.train, config)
    loader = torch.utils.data.DataLoader(dataset, batch_size=task.batch, drop_last=True)
    return Pass(batches=lambda: iter(loader), ids=lambda batch: batch["tokens"])


if __name__ == "__main__":
    serve(make)
