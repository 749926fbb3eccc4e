"""Promises of the dataset on disk: exact access, and no damage goes unnoticed."""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.small_datasets import write_dataset

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.shard import Shard

SHARDS = [
    [[1, 2, 3], [4], [5, 6]],
    [[7, 8, 9, 10, 11]],
    [[12], [13], [14, 15, 16, 17]],
]
FLAT = [t for shard in SHARDS for document in shard for t in document]
DOCUMENTS = [document for shard in SHARDS for document in shard]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "d", SHARDS)
    return tmp_path / "d"


def test_every_token_range_and_document_reads_back(path: Path) -> None:
    dataset = Dataset.open(str(path))
    assert (dataset.tokens, dataset.documents) == (len(FLAT), len(DOCUMENTS))
    for start in range(len(FLAT) + 1):
        for stop in range(start, len(FLAT) + 1):
            assert dataset.read(start, stop).tolist() == FLAT[start:stop]
    for number, tokens in enumerate(DOCUMENTS):
        document = dataset.document(number)
        assert document.tokens.tolist() == tokens
        assert (document.id, document.position) == (f"doc-{number}", number)
        start, stop = dataset.document_span(number)
        assert {dataset.document_at(t) for t in range(start, stop)} == {number}


def test_ends_between_are_the_borders_strictly_inside(path: Path) -> None:
    dataset = Dataset.open(str(path))
    ends = np.cumsum([len(d) for d in DOCUMENTS]).tolist()
    for start in range(len(FLAT)):
        for stop in range(start, len(FLAT) + 1):
            expected = [e for e in ends if start < e < stop]
            assert dataset.ends_between(start, stop).tolist() == expected


def test_numpy_opens_every_array(path: Path) -> None:
    tokens = np.load(path / "shard-00000.tokens.npy", mmap_mode="r")
    ends = np.load(path / "shard-00000.ends.npy", mmap_mode="r")
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert ends.dtype == np.uint64
    assert ends.tolist() == [3, 4, 6]


def test_a_reader_written_from_the_format_page_agrees_with_ours(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    body = {k: v for k, v in manifest.items() if k not in ("digest", "tools")}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest() == manifest["digest"]
    documents, rows = [], []
    for shard in manifest["shards"]:
        arrays = {}
        for kind, dtype in (("tokens", manifest["dtype"]), ("ends", "uint64")):
            raw = (path / f"{shard['name']}.{kind}.npy").read_bytes()
            assert hashlib.sha256(raw).hexdigest() == shard["sha256"][kind]
            assert raw[:8] == b"\x93NUMPY\x01\x00"
            count = int(re.search(rb"'shape': \((\d+),\)", raw[:128]).group(1))
            arrays[kind] = np.frombuffer(raw, dtype, count, offset=128)
        tokens, ends = arrays["tokens"], arrays["ends"].tolist()
        assert len(tokens) == shard["tokens"] == ends[-1]
        documents += [tokens[a:b].tolist() for a, b in zip([0, *ends], ends, strict=False)]
        rows += pq.read_table(path / f"{shard['name']}.docs.parquet").to_pylist()
    ours = [Dataset.open(str(path)).document(i) for i in range(len(documents))]
    assert documents == [d.tokens.tolist() for d in ours]
    assert [r["id"] for r in rows] == [d.id for d in ours]
    assert len(documents) == manifest["totals"]["documents"]


def test_least_recently_used_shards_are_closed_beyond_the_limit(path: Path) -> None:
    dataset = Dataset.open(str(path), max_open=1)
    first = dataset.shard(0)
    assert dataset.shard(0) is first
    dataset.shard(1)
    assert dataset.shard(0) is not first


class Shared(OrderedDict[int, Shard]):
    """Another thread puts a shard away as soon as this one has found it."""

    def get(self, key: int, default: Shard | None = None) -> Shard | None:
        return self.pop(key, default)


def test_a_shard_that_another_thread_puts_away_meanwhile_is_read(path: Path) -> None:
    dataset = Dataset.open(str(path))
    dataset._open = Shared()
    for _ in range(2):
        assert dataset.read(0, 3).tolist() == FLAT[:3]
