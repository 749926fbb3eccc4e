"""Labels: which tokens are trained, and what each label of an evaluation counts for."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.project import Project
from support.small_datasets import mix_datasets, random_shards, write_dataset
from support.tokenizing import make_dataset

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import Manifest
from olm_data.errors import UsageError, ValidationError
from olm_data.rows.label_groups import MOST_GROUPS, NONE, OTHER, LabelGroups
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


BY = ("language", "input", "document_length", "position", "context")


def write(path: Path, documents: list[tuple[str, str | None]]) -> Path:
    lines = [
        {"id": f"d{n}", "text": text} | ({} if language is None else {"language": language})
        for n, (text, language) in enumerate(documents)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


EOS = "<|endoftext|>"


@pytest.fixture(scope="module", params=[("none", EOS), (EOS, "none"), ("none", "none")])
def dataset(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path
) -> Dataset:
    """Documents of 1 to several hundred tokens, in two files and three languages, that BOS begins,
    or EOS ends, or neither."""
    folder = tmp_path_factory.mktemp("groups")
    words = ["the", "quick", "brown", "fox", "jumps", "über", "a", "lazy", "dog", "while", "owls"]
    sizes = [1, 2, 700, 30, 31, 32, 33, 64, 90, 200, 5, 63]
    texts = [" ".join(words[(n + k) % len(words)] for k in range(n)) for n in sizes]
    languages = ["en", "de", None, "en", "fr", "de", "en", "en", None, "fr", "de", "en"]
    documents = list(zip(texts, languages, strict=True))
    inputs = [write(folder / "a.jsonl", documents[:7]), write(folder / "b.jsonl", documents[7:])]
    bos, eos = request.param
    make_dataset(inputs, tiny_tokenizer, folder / "data", keep=["language"], bos=bos, eos=eos)
    return Dataset.open(str(folder / "data"))


def octave(number: int, edges: list[int]) -> str:
    low = max([0, *(edge for edge in edges if edge <= number)])
    return f"{low}-{max(64, 2 * low) - 1}"


def by_loop(dataset: Dataset, length: int, nats: np.ndarray) -> dict[tuple[str, str], list[float]]:
    """Nats, labels and bytes of each group, one label after the other."""
    spans = [dataset.document_span(n) for n in range(dataset.documents)]
    longest = max(stop - start for start, stop in spans)
    edges = [64 << k for k in range(20) if 64 << k < longest]
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for number, (start, stop) in enumerate(spans):
        origin, rules = dataset.origin(number), dataset.manifest.tokenizer
        after_eos = rules.bos is None and rules.eos is not None
        first = 0 if after_eos else 1
        known = origin.text_bytes if rules.delimiters else 0
        for token in range(start, stop - first):  # the label is the token after it, or this one
            piece = max(start, token // length * length)
            keys = [
                ("", ""),
                ("language", str(origin.columns["language"] or NONE)),
                ("input", origin.input),
                ("document_length", octave(stop - start, edges)),
                ("position", octave(token + first - start, edges)),
                ("context", octave(token + 1 - piece, edges)),
            ]
            for key in keys:
                share = known / (stop - start - first)
                for column, value in enumerate((nats[token], 1.0, share)):
                    sums[key][column] += value
    return sums


@settings(max_examples=3)
@given(length=st.integers(4, 300), batch=st.integers(1, 7), ranks=st.integers(1, 3))
def test_sums_are_those_of_a_loop_over_labels(
    dataset: Dataset, length: int, batch: int, ranks: int
) -> None:
    nats = np.random.default_rng(length).exponential(size=dataset.tokens)
    groups = LabelGroups(dataset, length, BY)
    rules = dataset.manifest.tokenizer
    rows = DatasetRows(dataset, length, rules.eos_begins)
    total, each = groups.sums(), -(-rows.total_rows // (batch * ranks)) * batch
    for rank in range(ranks):
        sums = groups.sums()
        for first in range(rank * each, (rank + 1) * each, batch):
            found = rows.read(np.arange(first, first + batch))
            segments = groups.segments(int(found.rows[0]), batch)
            valid = (found.labels != -100).ravel()
            losses = np.zeros(batch * length)
            losses[valid] = nats[first * length : (first + batch) * length][
                valid[: max(0, dataset.tokens - first * length)]
            ]
            edges = segments.offsets
            pairs = list(itertools.pairwise(edges[:-1]))
            of_each = np.array([losses[a:b].sum() for a, b in pairs])
            labels = np.array([valid[a:b].sum() for a, b in pairs], float)
            assert not valid[edges[-2] :].any(), "behind the last segment is padding"
            groups.add(sums, segments, of_each, labels)
        total += sums
    expected = by_loop(dataset, length, nats)
    got = {key: row for key, row in zip(groups.groups, total, strict=True) if row[1]}
    assert got.keys() == expected.keys()
    for key, row in expected.items():
        np.testing.assert_allclose(got[key], row, rtol=1e-9, err_msg=str(key))
    assert got["", ""][2] == pytest.approx(groups.text_bytes)
    missing = 0 if rules.eos_begins is not None else dataset.documents
    assert got["", ""][1] == groups.labels == dataset.tokens - missing
    assert bool(groups.text_bytes) == bool(rules.delimiters)


def test_columns_that_are_not_there_are_refused(dataset: Dataset) -> None:
    with pytest.raises(UsageError, match="no column 'langage' to group by"):
        LabelGroups(dataset, 32, ["langage"])


def test_a_kept_column_never_hides_a_computed_one(project: Project) -> None:
    (project / "a.jsonl").write_text('{"text": "some words", "context": "mine"}\n')
    project.make([project / "a.jsonl"], "data", keep=["context"])
    with pytest.raises(UsageError, match="'context' is a kept column, and a way"):
        LabelGroups(project.open("data"), 32, ["context"])


def test_values_beyond_the_most_frequent_go_into_one_group(project: Project) -> None:
    documents = [("word " * (1 + n), f"l{n:02}") for n in range(MOST_GROUPS + 5)]
    path = write(project / "a.jsonl", [*documents, ("same", "l00")])
    project.make([path], "data", keep=["language"])
    found = LabelGroups(project.open("data"), 32, ["language"]).groups[1:]
    names = [group for _, group in found]
    assert (len(names), names[-1]) == (MOST_GROUPS, OTHER)
    assert names[0] == f"l{MOST_GROUPS + 4:02}", "the one with the most tokens is the first"


def test_document_rows_that_were_changed_are_refused(project: Project) -> None:
    path = write(project / "a.jsonl", [("some words", "de")])
    project.make([path], "data", keep=["language"])
    file = next((project / "data").glob("*.docs.parquet"))
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(ValidationError, match="do not match their digest"):
        LabelGroups(project.open("data"), 32)
