"""FAULTS rows 29 to 35: every truncation and flipped bit of a small dataset is found."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.small_datasets import random_shards, write_mixture
from support.tokenizing import make_dataset, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.record import BLOCK_BYTES, HEADER_BYTES
from olm_data.errors import OlmError, ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.extensions.verify.shard import check_shard
from olm_data.storage.store import Store
from olm_train.data import DataLoader, EvalLoader

DOCUMENTS = ["one two", "three", "\u4f60", "a longer text to have some tokens of, five six seven"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A dataset of two shards, as small as can be."""
    folder = tmp_path_factory.mktemp("small")
    files = [write_jsonl(folder / f"{k}.jsonl", DOCUMENTS[2 * k : 2 * k + 2]) for k in range(2)]
    make_dataset(files, tiny_tokenizer, folder / "out", shard_tokens=25)
    assert len(Dataset.open(str(folder / "out")).manifest.shards) == 2
    return folder / "out"


@pytest.fixture
def dataset(made: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(made, tmp_path / "out"))


def flips(path: Path, step: int = 1) -> Iterator[int]:
    """Flip each bit (or every `step`-th) of a file in turn; yield its number; restore it."""
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), step):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        yield bit
    path.write_bytes(data)


def check(dataset: Path) -> bool:
    """Whether the checks of `verify` on shard 0 find nothing."""
    store = Store(str(dataset))
    manifest = Dataset.open(str(dataset)).manifest
    result = check_shard(store, manifest, manifest.shards[0], lambda _: None)
    return result.report.ok


@pytest.mark.parametrize("kind", ["tokens.npy", "ends.npy"])
def test_29_every_other_length_is_refused_at_open_and_by_verify(kind: str, dataset: Path) -> None:
    path = dataset / f"shard-00000.{kind}"
    whole = path.read_bytes()
    assert check(dataset)
    for length in range(len(whole) + 2):
        path.write_bytes((whole + b"\0\0")[:length])
        if length == len(whole):
            Dataset.open(str(dataset)).read(0, 1)
            continue
        with pytest.raises(ValidationError) as caught:
            Dataset.open(str(dataset)).shard(0)
        assert path.name in str(caught.value.where)
        assert not check(dataset)


@pytest.mark.slow
def test_30_every_flipped_bit_of_tokens_is_found_by_verify_and_at_first_read(dataset: Path) -> None:
    path = dataset / "shard-00000.tokens.npy"
    for bit in flips(path):
        assert not check(dataset), f"verify missed bit {bit}"
        opened = Dataset.open(str(dataset))
        with pytest.raises(ValidationError) as caught:
            opened.read(0, 1)
        assert path.name in str(caught.value.where)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ends.npy", "docs.parquet", "json"])
def test_31_every_flipped_bit_of_a_side_file_is_found_by_verify(kind: str, dataset: Path) -> None:
    path = dataset / f"shard-00000.{kind}"
    step = 3 if kind == "ends.npy" else 53  # one digest covers the others: a sample will do
    for bit in flips(path, step):
        assert not check(dataset), f"verify missed bit {bit}"


def test_31_every_flipped_bit_of_the_ends_is_refused_at_open(dataset: Path) -> None:
    for bit in flips(dataset / "shard-00000.ends.npy"):
        with pytest.raises(ValidationError):
            Dataset.open(str(dataset)).shard(0)
        assert bit >= 0


@pytest.mark.slow
def test_31_a_flipped_bit_of_the_manifest_is_refused_unless_it_says_the_same(dataset: Path) -> None:
    """Bits of the informational `tools`, and of white space, change nothing that is digested."""
    whole = Dataset.open(str(dataset)).manifest
    for _ in flips(dataset / "manifest.json", 3):
        try:
            seen = Dataset.open(str(dataset)).manifest
        except ValidationError:
            continue
        assert seen.compute_digest() == whole.digest == seen.digest


def test_32_shards_swapped_with_each_other_or_from_another_dataset_are_refused(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    """Shards of the same lengths: only their digests tell them apart."""
    texts = ("six two three", "ten two three", "one two three")
    files = [write_jsonl(tmp_path / f"{k}.jsonl", [text]) for k, text in enumerate(texts)]
    dataset, other = tmp_path / "out", tmp_path / "other"
    make_dataset(files[:2], tiny_tokenizer, dataset, shard_tokens=10)
    make_dataset(files[2:], tiny_tokenizer, other, shard_tokens=10)
    shards = [s for d in (dataset, other) for s in Dataset.open(str(d)).manifest.shards]
    assert len(shards) == 3
    assert len({(shard.tokens, shard.documents) for shard in shards}) == 1
    kinds = ("tokens.npy", "ends.npy", "docs.parquet", "json")
    for kind in kinds:
        one, two = dataset / f"shard-00000.{kind}", dataset / f"shard-00001.{kind}"
        swapped = one.read_bytes(), two.read_bytes()
        two.write_bytes(swapped[0])
        one.write_bytes(swapped[1])
    assert not verify(str(dataset)).ok
    with pytest.raises(ValidationError):
        Dataset.open(str(dataset)).read(0, 1)
    for kind in kinds:
        shutil.copy(other / f"shard-00000.{kind}", dataset)
    assert not verify(str(dataset)).ok
    with pytest.raises(ValidationError):
        Dataset.open(str(dataset)).read(0, 1)


@pytest.mark.parametrize("foreign", [np.uint32, ">u2", np.int16, np.float16, "raw"])
def test_33_tokens_of_another_type_or_without_a_header_are_refused(
    foreign: str | type, dataset: Path
) -> None:
    path = dataset / "shard-00000.tokens.npy"
    tokens = np.load(path)
    if foreign == "raw":
        path.write_bytes(tokens.tobytes())
    else:
        np.save(path, tokens.astype(foreign))
    with pytest.raises(ValidationError) as caught:
        Dataset.open(str(dataset)).shard(0)
    assert path.name in str(caught.value.where)
    assert not check(dataset)


def test_34_an_id_outside_the_vocabulary_is_refused_at_write(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from olm_data.encoders.hf import HfEncoder

    encode = HfEncoder.encode

    def wrong(self: HfEncoder, data: np.ndarray, offsets: np.ndarray) -> tuple:
        ids, ends = encode(self, data, offsets)
        ids[-1] = 512
        return ids, ends

    monkeypatch.setattr(HfEncoder, "encode", wrong)
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    with pytest.raises(ValidationError, match="512 is outside the vocabulary"):
        make_dataset([source], tiny_tokenizer, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def without_a_merge(value: dict) -> None:
    value["model"]["merges"].pop()


def with_a_normalizer(value: dict) -> None:
    value["normalizer"] = {"type": "NFC"}


@pytest.mark.parametrize("change", [without_a_merge, with_a_normalizer])
def test_35_a_changed_tokenizer_is_refused_on_the_same_output_and_found_by_verify(
    change: Callable[[dict], None], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    make_dataset([source], tiny_tokenizer, tmp_path / "out")
    value = json.loads(tiny_tokenizer.read_bytes())
    change(value)
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    with pytest.raises(OlmError) as caught:
        make_dataset([source], tmp_path / "tokenizer.json", tmp_path / "out")
    assert caught.value.exit_code == 7
    assert "tokenizer: " in str(caught.value)
    shutil.copy(tmp_path / "tokenizer.json", tmp_path / "out" / "tokenizer.json")
    found = verify(str(tmp_path / "out")).findings
    assert [(Path(f.file).name, f.field) for f in found] == [("tokenizer.json", "sha256")]


S, TOKENS = 512, 100_000  # shards of more than three blocks each


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    sources = {"a": random_shards(0, [[1000] * (TOKENS // 1000)] * 2)}
    return write_mixture(
        tmp_path, sources, stages=[(150_000, {"a": 1})], sequence_length=S, dtypes={"a": "uint16"}
    )


def flip(path: Path, byte: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        value = os.pread(file.fileno(), 1, byte)[0]
        os.pwrite(file.fileno(), bytes([value ^ (1 << bit)]), byte)


def first_step_that_reads(lock: Path, shard: int, block: int) -> int:
    """The first step whose rows touch a block of a shard's tokens file."""
    loader = open_loader(lock)
    low = (block * BLOCK_BYTES - HEADER_BYTES) // 2 + shard * TOKENS
    high = low + BLOCK_BYTES // 2
    for step in range(loader.steps):
        place = loader.lock.schedule().locate(loader.rows_of_step(step))
        if np.any((place.row * S + S + 1 > low) & (place.row * S < high)):
            return step
    raise AssertionError("no step reads the block")


def open_loader(lock: Path, verify: str = "lazy") -> DataLoader:
    return DataLoader(
        lock, global_batch_size=4 * S, rank_microbatch_size=2 * S, prefetch=3, verify=verify
    )


@pytest.mark.parametrize("bit", range(8))
def test_30_the_step_that_first_reads_the_block_fails_and_no_earlier_one(
    lock: Path, bit: int
) -> None:
    flip(lock.parent / "a" / "shard-00001.tokens.npy", 2 * BLOCK_BYTES + 777, bit)
    bad = first_step_that_reads(lock, shard=1, block=2)
    loader = open_loader(lock)
    steps = iter(loader)
    for _ in range(bad):
        next(steps)
    with pytest.raises(ValidationError, match="have changed") as caught:
        next(steps)
    assert "shard-00001.tokens.npy" in str(caught.value.where)
    assert loader.state_dict()["rows_consumed"] == bad * 4  # that of the last good step


def test_30_full_verification_finds_it_when_the_shard_is_opened(lock: Path) -> None:
    for shard in (0, 1):
        flip(lock.parent / "a" / f"shard-0000{shard}.tokens.npy", HEADER_BYTES + 1)
    with pytest.raises(ValidationError, match="have changed"):
        next(iter(open_loader(lock, verify="full")))


def test_30_without_verification_tokens_pass_and_ends_do_not_leave_the_shard(lock: Path) -> None:
    flip(lock.parent / "a" / "shard-00001.tokens.npy", HEADER_BYTES + 1)
    assert sum(1 for _ in open_loader(lock, verify="off")) == open_loader(lock).steps


def test_30_evaluation_finds_it_too(lock: Path) -> None:
    flip(lock.parent / "a" / "shard-00001.tokens.npy", 2 * BLOCK_BYTES + 777)
    with pytest.raises(ValidationError, match="have changed"):
        list(EvalLoader(lock.parent / "a", S, 4 * S))
