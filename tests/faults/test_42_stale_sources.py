"""FAULTS row 42: what was removed or replaced is in nothing that is made or read after it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support.remote import TOKENS, remote_mixture
from support.store_proxy import Proxy
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import mix
from olm_data.rows.cache_plan import CacheOptions
from olm_data.rows.reader import RowReader
from olm_data.storage.store import Store

YAML = """
version: 1
seed: 1
sequence_length: 16
sources:
  a: {data: ./a}
%s
stages:
  - {name: main, tokens: 512, weights: {a: 1%s}}
"""


def test_42_a_lock_made_after_a_source_was_removed_names_it_nowhere(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    for number, name in enumerate("ab"):
        source = write_jsonl(tmp_path / f"{name}.jsonl", texts(60, 1000 * number))
        make_dataset([source], tiny_tokenizer, tmp_path / name)
    manifest, path = tmp_path / "m.yaml", tmp_path / "m.lock.json"
    removed = Dataset.open(str(tmp_path / "b")).digest
    manifest.write_text(YAML % ("  b: {data: ./b}", ", b: 1"))
    mix(str(manifest), output=str(path))
    assert removed in path.read_text()
    manifest.write_text(YAML % ("", ""))
    with pytest.raises(ConflictError, match="another lock is here"):
        mix(str(manifest), output=str(path))
    mix(str(manifest), output=str(path), overwrite=True)
    assert removed not in path.read_text()
    shutil.rmtree(tmp_path / "b")
    lock = Lock.read(path)
    assert [source.name for source in lock.sources] == ["a"] == list(lock.locations)
    assert [dataset.digest for dataset in lock.open_datasets()] == [
        Dataset.open(str(tmp_path / "a")).digest
    ]


def test_42_a_cached_shard_of_a_dataset_that_was_replaced_is_never_read(
    proxy: Proxy, tmp_path: Path
) -> None:
    url = f"s3://{proxy.server['bucket']}/{tmp_path.name}/a"
    cache, rows = CacheOptions(folder=str(tmp_path / "cache")), np.arange(200)
    locks = remote_mixture(tmp_path, url, seed=1)
    RowReader(locks[0], cache=cache).read(rows)
    Store(url).clear()
    shutil.rmtree(tmp_path / "a")
    remote, local = remote_mixture(tmp_path, url, seed=2)  # the same names, other documents
    reader = RowReader(remote, cache=cache)
    read = reader.read(rows)
    assert np.array_equal(read.tokens, RowReader(local).read(rows).tokens)
    assert reader.remote is not None
    assert reader.remote.fetched_again == 0  # it lies under another key: it is not even opened
    sizes = [int(path.name.split("-")[1]) for path in (tmp_path / "cache").glob("[!.]*-*")]
    assert min(sizes) > 2 * TOKENS
