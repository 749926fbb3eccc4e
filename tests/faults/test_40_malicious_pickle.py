"""Row 40: no path that data takes unpickles anything: a payload that would run leaves no trace."""

from __future__ import annotations

import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.false_files import Payload
from support.reading import resolve_source
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, OlmError
from olm_data.extensions.verify.datasets import verify
from olm_data.sources import plan_units, read_units
from olm_data.tokenizer.tokenizer import load_tokenizer

NAMES = [
    "a.jsonl",
    "a.json",
    "a.parquet",
    "a.arrow",
    "a.feather",
    "a.txt",
    "a.jsonl.gz",
    "a.txt.zst",
]


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def test_40_the_payload_works_where_somebody_unpickles_it(canary: Path) -> None:
    pickle.loads(pickle.dumps(Payload(canary)))
    assert canary.exists()


@pytest.mark.parametrize("name", NAMES)
def test_40_a_pickle_under_the_name_of_a_source_is_refused_or_dropped(
    name: str, canary: Path, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Payload(canary)))
    documents = 0
    with suppress(InputError):
        plan = resolve_source([str(tmp_path / name)])
        units = list(plan_units(0, plan.inputs[0], plan.options, 1 << 20))
        documents = sum(b.documents for b in read_units(plan.inputs, units, plan.options))
    assert documents == 0
    assert not canary.exists()


def read_all(folder: str) -> None:
    dataset = Dataset.open(folder, verify="full")
    dataset.read(0, dataset.tokens)
    _ = dataset.document(0), dataset.shard(0).record


@pytest.mark.parametrize("suffix", [".tokens.npy", ".ends.npy", ".docs.parquet", ".json"])
def test_40_a_shards_file_that_is_a_pickle_is_refused(
    suffix: str, tiny_tokenizer: Path, canary: Path, tmp_path: Path
) -> None:
    make_dataset([write_jsonl(tmp_path / "a.jsonl", texts(9))], tiny_tokenizer, tmp_path / "out")
    path = tmp_path / "out" / f"shard-00000{suffix}"
    size = path.stat().st_size
    if suffix.endswith(".npy"):
        np.save(path, np.array([Payload(canary)], dtype=object), allow_pickle=True)
    else:
        path.write_bytes(pickle.dumps(Payload(canary)))
    path.write_bytes(path.read_bytes()[:size].ljust(size, b"\0"))  # not refused for its size alone
    assert not verify(str(tmp_path / "out")).ok
    with pytest.raises(OlmError):
        read_all(str(tmp_path / "out"))
    assert not canary.exists()


@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "tokenizer.json"])
def test_40_a_side_file_that_is_a_pickle_is_refused(
    name: str, tiny_tokenizer: Path, canary: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(9))
    make_dataset([source], tiny_tokenizer, tmp_path / "out")
    (tmp_path / "out" / name).write_bytes(pickle.dumps(Payload(canary)))
    if name != "manifest.json":
        assert not verify(str(tmp_path / "out")).ok
    else:
        with pytest.raises(OlmError):
            Dataset.open(str(tmp_path / "out"))
    if name == "plan.json":
        with pytest.raises(OlmError):
            make_dataset([source], tiny_tokenizer, tmp_path / "out")
    assert not canary.exists()


def test_40_a_tokenizer_that_is_a_pickle_is_refused(canary: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(pickle.dumps(Payload(canary)))
    for place in (tmp_path / "tokenizer.json", tmp_path):
        with pytest.raises(OlmError):
            load_tokenizer(place)
    assert not canary.exists()


def test_40_a_folder_saved_by_torch_is_no_source(canary: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "data.pt").write_bytes(pickle.dumps(Payload(canary)))
    with pytest.raises(OlmError):
        resolve_source([str(folder)])
    shutil.copy(folder / "data.pt", folder / "data.npy")
    with pytest.raises(OlmError):
        resolve_source([str(folder / "data.npy")])
    assert not canary.exists()
