"""Datasets for tests and benchmarks, written by the product's own writer, or sparse and huge.

`write_dataset` puts given documents on disk through `ShardWriter` and `build_manifest`,
`write_mixture` also mixes them into a lock.
`write_sparse_dataset` makes any number of equal shards of zeros out of a few inodes, so that a
dataset of 10^13 tokens takes seconds and a few megabytes to make.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import yaml

from olm_data.dataset.docs import docs_schema
from olm_data.dataset.inputs import Container
from olm_data.dataset.manifest import (
    MANIFEST,
    InputInfo,
    Manifest,
    ShardDigests,
    ShardInfo,
    Totals,
    build_manifest,
)
from olm_data.dataset.options import Options
from olm_data.dataset.record import (
    BLOCK_BYTES,
    HEADER_BYTES,
    RECORD,
    TOKENS,
    Blocks,
    FileInfo,
    ShardRecord,
    encode_units,
    npy_header,
    window_counts,
)
from olm_data.dataset.shard import ENDS
from olm_data.dataset.shard_writer import ShardWriter
from olm_data.dataset.tokenizer import TokenizerInfo
from olm_data.dataset.tools import Tools
from olm_data.mixture.mix import mix
from olm_data.storage.store import Store

_LINKS_PER_INODE = 30_000  # ext4 allows 65,000


def tokenizer_info(name: str, vocab_size: int, eos: int | None) -> TokenizerInfo:
    """A tokenizer that exists by name only."""
    sha256 = hashlib.sha256(name.encode()).hexdigest()
    return TokenizerInfo(sha256, sha256, vocab_size, None, eos, "plain")


def random_shards(
    seed: int, lengths: Iterable[Sequence[int]], vocab_size: int = 50_000
) -> list[list[np.ndarray]]:
    """Return documents of random ids with the given lengths, shard by shard."""
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(0, vocab_size, n, dtype=np.uint32) for n in documents]
        for documents in lengths
    ]


def write_dataset(
    path: str | Path,
    shards: Sequence[Sequence[Sequence[int] | np.ndarray]],
    *,
    dtype: str = "uint16",
    vocab_size: int = 50_000,
    eos: int | None = None,
    tokenizer: str = "test",
    container: Container = "npy",
    columns: Mapping[str, pa.Array] | None = None,
    trained: Sequence[Sequence[Sequence[bool] | np.ndarray]] | None = None,
    shuffle: int | None = None,
) -> Manifest:
    """Write a dataset whose shard i holds the documents `shards[i]` (token ids each).

    Args:
        columns: kept columns, or `id`: a value for each document of all shards.
        trained: for each token whether it is trained; None: all are.
        shuffle: seed of the order of the documents in each shard.
    """
    store, records, number = Store(path), [], 0
    kept = {name: values for name, values in (columns or {}).items() if name != "id"}
    keep = pa.schema([pa.field(name, values.type) for name, values in kept.items()])
    with store.staging() as staging:
        for i, documents in enumerate(shards):
            writer = ShardWriter(
                store,
                f"shard-{i:05d}",
                dtype=np.dtype(dtype),
                vocab_size=vocab_size,
                staging=staging,
                container=container,
                keep=keep,
                labels=trained is not None,
                shuffle=shuffle,
            )
            ids = np.concatenate([np.asarray(document, np.uint32) for document in documents])
            lengths = np.array([len(document) for document in documents])
            count = np.arange(number, number + len(documents))
            rows = {
                "id": pa.array([f"doc-{n}" for n in count]),
                "input": pa.array(np.zeros(len(documents), np.int32)),
                "position": pa.array(count),
                "text_bytes": pa.array(4 * lengths),
                "content_hash": pa.array(count.astype(np.uint64)),
            }
            for name, values in (columns or {}).items():
                rows[name] = values.slice(number, len(documents))
            batch = pa.record_batch(rows, schema=docs_schema(keep))
            mask = None if trained is None else np.concatenate(trained[i]).astype(bool)
            writer.append(ids, np.append(0, np.cumsum(lengths)), batch, mask)
            record = writer.commit(plan="p", units=[], dropped={})
            data = store.read(record.name + RECORD)
            records.append((record, hashlib.sha256(data).hexdigest()))
            number += len(documents)
    info = tokenizer_info(tokenizer, vocab_size, eos)
    manifest = build_manifest(
        tokenizer=info,
        dtype=np.dtype(dtype),
        options=Options(),
        plan="p",
        inputs=[InputInfo("input.jsonl", 1, "line", number, info.sha256)],
        records=records,
        dropped={},
        documents_in=number,
        tools=Tools(),
        container=container,
    )
    store.create(MANIFEST, manifest.encode())
    return manifest


def write_mixture(
    folder: Path,
    sources: Mapping[str, Sequence[Sequence[np.ndarray]]],
    *,
    stages: Sequence[tuple[int, Mapping[str, int]]],
    sequence_length: int,
    seed: int = 20260101,
    dtypes: Mapping[str, str] | None = None,
    packing: str = "concat",
    lengths: Sequence[int] = (),
) -> Path:
    """Write each source as a dataset (documents shard by shard) and mix them; return the lock.

    Args:
        stages: (tokens, weights by source) of each stage.
        lengths: sequence length of each stage, where they have their own.
        dtypes: dtype of a source that is not uint16.
    """
    for name, shards in sources.items():
        write_dataset(folder / name, shards, dtype=(dtypes or {}).get(name, "uint16"))
    return mix_datasets(
        folder,
        list(sources),
        stages=stages,
        sequence_length=sequence_length,
        seed=seed,
        packing=packing,
        lengths=lengths,
    )


def mix_datasets(
    folder: Path,
    names: Sequence[str],
    *,
    stages: Sequence[tuple[int, Mapping[str, int]]],
    sequence_length: int,
    seed: int = 20260101,
    packing: str = "concat",
    lengths: Sequence[int] = (),
) -> Path:
    """Write `manifest.yaml` over the datasets in `folder` and compile it; return the lock."""
    manifest: dict[str, Any] = {
        "version": 1,
        "seed": seed,
        "sequence_length": sequence_length,
        "packing": packing,
        "sources": {name: {"data": f"./{name}", "max_epochs": 1000} for name in names},
        "stages": [
            {"name": f"stage-{i}", "tokens": tokens, "weights": dict(weights)}
            for i, (tokens, weights) in enumerate(stages)
        ],
    }
    for stage, length in zip(manifest["stages"], lengths, strict=bool(lengths)):
        stage["sequence_length"] = length
    path = folder / "manifest.yaml"
    path.write_text(yaml.safe_dump(manifest, sort_keys=False))
    return Path(mix(str(path)).path)


def write_sparse_dataset(
    path: Path,
    *,
    shards: int,
    tokens: int,
    documents: int,
    dtype: str = "uint16",
    vocab_size: int = 50_000,
) -> str:
    """Write a dataset of `shards` equal shards of `tokens` zeros in `documents` documents each.

    Shards are hard links to a few sparse files; there is no docs.parquet, so it can be trained on
    and not peeked into. Returns the dataset's digest.
    """
    sha = hashlib.sha256(b"unread").hexdigest()
    path.mkdir(parents=True)
    kind = np.dtype(dtype)
    ends = np.linspace(0, tokens, documents + 1).astype(np.uint64)[1:]
    ends_bytes = npy_header(np.dtype(np.uint64), documents) + ends.tobytes()
    header = npy_header(kind, tokens)
    size = HEADER_BYTES + tokens * kind.itemsize
    full, rest = divmod(size, BLOCK_BYTES)
    zeros = bytes(BLOCK_BYTES)
    blocks = [zlib.crc32(zeros)] * full + ([zlib.crc32(zeros[:rest])] if rest else [])
    blocks[0] = zlib.crc32(header + zeros[HEADER_BYTES : min(size, BLOCK_BYTES)])
    sha256 = {"tokens": sha, "ends": hashlib.sha256(ends_bytes).hexdigest(), "docs": sha}
    record = ShardRecord(
        version=1,
        name="shard-00000",
        plan="p",
        tokens=tokens,
        documents=documents,
        text_bytes=tokens,
        max_token_id=0,
        files={name: FileInfo(0, sha) for name, sha in sha256.items()},
        blocks=Blocks(BLOCK_BYTES, "".join(f"{crc:08x}" for crc in blocks)),
        units=encode_units([]),
        dropped={},
        windows=window_counts(ends),
    ).encode()
    sha256["record"] = hashlib.sha256(record).hexdigest()
    infos = []
    for index in range(shards):
        name = f"shard-{index:05d}"
        if index % _LINKS_PER_INODE == 0:
            first = name
            for suffix, data in ((TOKENS, header), (ENDS, ends_bytes), (RECORD, record)):
                (path / (name + suffix)).write_bytes(data)
            os.truncate(path / (name + TOKENS), size)
        else:
            for suffix in (TOKENS, ENDS, RECORD):
                os.link(path / (first + suffix), path / (name + suffix))
        infos.append(ShardInfo(name, tokens, documents, tokens, 0, ShardDigests(**sha256)))
    shard_windows = {width: 2 * most for width, (most, _, _) in window_counts(ends).items()}
    manifest = Manifest(
        format="olm-dataset",
        version=1,
        container="npy",
        dtype=dtype,
        tokenizer=tokenizer_info("test", vocab_size, None),
        stored_options=msgspec.Raw(b"{}"),
        plan="p",
        inputs=[InputInfo("input.jsonl", 1, "line", documents * shards, sha)],
        shards=infos,
        totals=Totals(tokens * shards, documents * shards, tokens * shards, documents * shards, 0),
        dropped={},
        max_documents_in=shard_windows,
        stored_tools={},
    )
    manifest = msgspec.structs.replace(manifest, digest=manifest.compute_digest())
    (path / MANIFEST).write_bytes(manifest.encode())
    return str(manifest.digest)
