"""Builds small real datasets on disk from given documents, through the product's own writer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from olm_data.dataset import InputInfo, Manifest, TokenizerInfo, build_manifest
from olm_data.shard import RECORD, ShardWriter, docs_schema
from olm_data.store import Store


def write_dataset(
    path: str | Path,
    shards: Sequence[Sequence[Sequence[int]]],
    *,
    dtype: str = "uint16",
    vocab_size: int = 50_000,
    eos: int | None = None,
    tokenizer: str = "test",
) -> Manifest:
    """Write a dataset whose shard i holds the documents `shards[i]` (lists of token ids)."""
    store, records, number = Store(path), [], 0
    with store.staging() as staging:
        for i, documents in enumerate(shards):
            writer = ShardWriter(
                store,
                f"shard-{i:05d}",
                dtype=np.dtype(dtype),
                vocab_size=vocab_size,
                staging=staging,
            )
            ids = np.array([t for document in documents for t in document], np.uint32)
            offsets = np.cumsum([0] + [len(document) for document in documents])
            rows = [
                {
                    "id": f"doc-{number + k}",
                    "input": 0,
                    "position": number + k,
                    "text_bytes": 4 * len(document),
                    "content_hash": number + k,
                }
                for k, document in enumerate(documents)
            ]
            writer.append(ids, offsets, pa.RecordBatch.from_pylist(rows, schema=docs_schema()))
            record = writer.commit(plan="p", units=[], dropped={})
            data = store.read(record.name + RECORD)
            records.append((record, hashlib.sha256(data).hexdigest()))
            number += len(documents)
    sha = hashlib.sha256(tokenizer.encode()).hexdigest()
    manifest = build_manifest(
        tokenizer=TokenizerInfo(tokenizer, sha, sha, vocab_size, None, eos, "plain"),
        dtype=np.dtype(dtype),
        options={},
        plan="p",
        inputs=[InputInfo("input.jsonl", 1, "line", number, sha)],
        records=records,
        dropped={},
        documents_in=number,
        tools={},
    )
    store.create("manifest.json", manifest.encode())
    return manifest
