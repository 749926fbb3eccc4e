"""Which tokens are trained: a label stands where the next token is in a trained run, else none."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_datasets import mix_datasets, random_shards, write_dataset

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import Manifest
from olm_data.errors import ValidationError
from olm_data.rows.reader import DatasetRows, RowReader
from olm_data.rows.remote_shards import remote_shard

LENGTHS = [[5, 3, 9, 24, 1, 1, 6], [1, 1, 1], [40, 8, 8, 8], [2, 30, 1]]
Masks = list[list[np.ndarray]]


def unique_shards(lengths: list[list[int]]) -> list[list[np.ndarray]]:
    """Documents whose ids are their places, so that a label says which token it is."""
    ids = iter(range(50_000))
    return [[np.array([next(ids) for _ in range(n)]) for n in shard] for shard in lengths]


CHATS = unique_shards(LENGTHS)


def random_masks(seed: int, lengths: list[list[int]]) -> Masks:
    rng = np.random.default_rng(seed)
    return [[rng.random(n) < rng.random() for n in shard] for shard in lengths]


def read_by_numpy(folder: Path) -> tuple[list[int], list[bool], list[int]]:
    """What docs/reference/format.md says, read with NumPy and json alone: ids, trained, ends."""
    ids: list[int] = []
    trained: list[bool] = []
    ends: list[int] = []
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["version"] == (2 if "trained" in manifest["totals"] else 1)
    for shard in manifest["shards"]:
        files = {k: f"{shard['name']}.{k}.npy" for k in ("tokens", "ends", "labels")}
        tokens = np.load(folder / files["tokens"])
        ends += [len(ids) + int(end) for end in np.load(folder / files["ends"])]
        mask = [True] * len(tokens)
        if "labels" in shard["sha256"]:
            data = (folder / files["labels"]).read_bytes()
            assert sha256(data).hexdigest() == shard["sha256"]["labels"]
            start, mask = 0, []
            for number, end in enumerate(np.load(folder / files["labels"]).tolist()):
                mask += [number % 2 == 1] * (end - start)
                start = end
            assert (number + 1, sum(mask)) == (shard["runs"], shard["trained"])
        ids, trained = ids + tokens.tolist(), trained + mask
        assert len(ids) == len(trained) == ends[-1]
    assert sum(trained) == manifest["totals"].get("trained", len(ids))
    return ids, trained, ends


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    packing=st.sampled_from(["concat", "best_fit", "document"]),
    parts=st.sampled_from([1, 2]),
    shuffle=st.sampled_from([None, 7]),
)
def test_a_label_is_the_next_token_of_its_document_if_and_only_if_that_one_is_trained(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    packing: str,
    parts: int,
    shuffle: int | None,
) -> None:
    folder = tmp_path_factory.mktemp("labels")
    masks = random_masks(seed, LENGTHS)
    write_dataset(folder / "chat", CHATS, trained=masks, shuffle=shuffle)
    write_dataset(folder / "text", random_shards(1, [[200]]), eos=7)
    lock = mix_datasets(
        folder,
        ["chat", "text"],
        stages=[(640, {"chat": 3, "text": 1})],
        sequence_length=8,
        packing=packing,
    )
    reader, every = RowReader(lock), RowReader(lock)
    every._shards.labelled = [False, False]  # the labels of the same rows if all were trained
    rows = np.arange(reader.total_rows)
    batch, whole = reader.read(rows, parts), every.read(rows, parts)
    ids, is_trained, _ = read_by_numpy(folder / "chat")
    untrained = [token for token, on in zip(ids, is_trained, strict=True) if not on]
    chats = (reader.schedule.locate(batch.rows).source == 0)[:, None]
    wanted = np.where(chats & np.isin(whole.labels, untrained), -100, whole.labels)
    np.testing.assert_array_equal(batch.labels, wanted)
    np.testing.assert_array_equal(batch.input_ids, whole.input_ids)
    assert (wanted != whole.labels).any()
    assert (wanted[chats[:, 0]] >= 0).any()


def digest_of(folder: Path) -> str:
    """sha256 of what a manifest says, but for what pyarrow's version is in: digests of docs.parquet
    and of what holds these."""
    written = json.loads((folder / "manifest.json").read_text())
    del written["digest"]
    for shard in written["shards"]:
        del shard["sha256"]["docs"], shard["sha256"]["record"]
    return sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()


def test_without_labels_the_files_are_those_of_version_1(tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path / "d", CHATS, eos=7)
    assert manifest.version == 1
    assert not list(tmp_path.glob("d/*labels*"))
    assert (
        digest_of(tmp_path / "d")
        == "701c91eee6d01ffb73b45d1d8046dc93f44456866ae6b0fc1cd8d974dd3a320f"
    )


def test_the_golden_labels_of_two_documents(tmp_path: Path) -> None:
    masks = [[[0, 0, 1, 1, 0], [1, 1, 0]], [[1], [0, 0]]]
    manifest = write_dataset(tmp_path, [[range(5), range(3)], [[1], [2, 3]]], trained=masks)
    labels = [np.load(tmp_path / f"shard-0000{n}.labels.npy").tolist() for n in (0, 1)]
    assert labels == [[2, 4, 5, 7, 8], [0, 1, 3]]
    assert [(s.runs, s.trained) for s in manifest.shards] == [(5, 4), (3, 1)]
    assert (manifest.version, manifest.trained) == (2, 5)
    assert digest_of(tmp_path) == "352c947077b0641605895f2f36e970f043d4144273440f2626df422966bd6544"
    data = (tmp_path / "shard-00000.labels.npy").read_bytes()
    golden = "d2d35640b6d4692fa5e155e84b7a0e82e7b0e5eba1df63c8aa8fdf474485d170"
    assert sha256(data).hexdigest() == golden == manifest.shards[0].sha256["labels"]


@pytest.mark.parametrize("seed", range(8))
def test_documents_take_their_labels_along_when_they_are_shuffled(
    tmp_path: Path, seed: int
) -> None:
    masks, shards = random_masks(seed, LENGTHS), CHATS
    write_dataset(tmp_path, shards, trained=masks, shuffle=seed)
    wanted = {
        int(ids[0]): mask.tolist()
        for shard, row in zip(shards, masks, strict=True)
        for ids, mask in zip(shard, row, strict=True)
    }
    assert {int(d.tokens[0]): d.trained.tolist() for d in Dataset.open(tmp_path)} == wanted


def test_labels_of_a_copied_shard_are_those_of_the_dataset(tmp_path: Path) -> None:
    write_dataset(tmp_path, CHATS, trained=random_masks(5, LENGTHS))
    dataset = Dataset.open(tmp_path)
    for number in range(len(dataset.manifest.shards)):
        wanted, name = dataset.open_shard(number).labels, dataset.manifest.shards[number].name
        copied = dataset.open_shard(number, copy=str(tmp_path)).labels
        assert (copied is not None, wanted is not None) == (True, True)
        np.testing.assert_array_equal(copied, wanted)
        size, digest = remote_shard(dataset, number).files[f"{name}.labels.npy"]
        data = (tmp_path / f"{name}.labels.npy").read_bytes()
        assert (size, digest) == (len(data), sha256(data).hexdigest())


def damaged(folder: Path, manifest: Manifest, change: Any) -> None:
    name = folder / "shard-00000.labels.npy"
    name.write_bytes(change(name.read_bytes()))
    Dataset.open(folder).read(0, manifest.totals.tokens)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-8] + b"\x07" + data[-7:], "do not match their digest"),
        (lambda data: data[:-8], "bytes, not"),
        (lambda data: data[:-16] + data[-8:] * 2, "do not match their digest"),
    ],
)
def test_damaged_labels_are_refused_when_their_shard_is_opened(
    tmp_path: Path, change: Any, said: str
) -> None:
    masks = random_masks(1, LENGTHS)
    manifest = write_dataset(tmp_path, CHATS, trained=masks)
    with pytest.raises(ValidationError, match=said):
        damaged(tmp_path, manifest, change)


def test_labels_of_another_shard_are_refused(tmp_path: Path) -> None:
    lengths = [[4, 4], [4, 4]]
    masks = [[[0, 1, 1, 0]] * 2, [[0, 0, 1, 1]] * 2]
    manifest = write_dataset(tmp_path, unique_shards(lengths), trained=masks)
    other = (tmp_path / "shard-00001.labels.npy").read_bytes()
    with pytest.raises(ValidationError):
        damaged(tmp_path, manifest, lambda data: other)


@pytest.mark.parametrize("eos", [None, 7])
def test_an_evaluation_counts_the_trained_tokens_alone(tmp_path: Path, eos: int | None) -> None:
    shards, masks = CHATS, random_masks(3, LENGTHS)
    write_dataset(tmp_path, shards, trained=masks, eos=eos)
    ids, trained, ends = read_by_numpy(tmp_path)
    rows = DatasetRows(Dataset.open(tmp_path), 8, eos)
    labels = rows.read(np.arange(rows.total_rows + 1)).labels
    first = {0, *ends} if eos is None else set()
    wanted = [
        t for n, (t, on) in enumerate(zip(ids, trained, strict=True)) if on and n not in first
    ]
    assert labels[labels != -100].tolist() == wanted
