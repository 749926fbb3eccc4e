"""FAULTS row 42: a source that was removed from the mixture is in nothing that is made after it.

There is no cache of datasets yet; what could be stale is a lock.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import mix

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
