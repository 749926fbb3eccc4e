"""Statistics: what is counted is what is there, for inputs, lengths, columns, drops and copies."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.project import Project
from support.tokenizing import texts

from olm_data.dataset.dataset import Dataset
from olm_data.extensions.stats.count import EXTREME_BYTES, Stats, collect

KEYS = ["content_hash", "text_bytes"]


@pytest.fixture(scope="module")
def rows(folder: Path) -> pa.Table:
    dataset = Dataset.open(str(folder / "out"))
    return pa.concat_tables(
        dataset.shard(i).docs.table(dataset.shard(i).docs.schema().names)
        for i in range(len(dataset.manifest.shards))
    )


@pytest.fixture(scope="module")
def lengths(folder: Path) -> np.ndarray:
    dataset = Dataset.open(str(folder / "out"))
    return np.array([len(dataset.document(n).tokens) for n in range(dataset.documents)])


def test_totals_are_the_manifest_s(stats: Stats, folder: Path) -> None:
    totals = Dataset.open(str(folder / "out")).manifest.totals
    assert (stats.documents, stats.tokens, stats.text_bytes) == (
        totals.documents,
        totals.tokens,
        totals.text_bytes,
    )
    assert (stats.documents_in, stats.dropped) == (224, {"empty": 2})
    assert stats.other_split == 222 - stats.documents > 0
    assert stats.tokens_per_byte == totals.tokens / totals.text_bytes


def test_inputs_have_their_documents_tokens_bytes_drops_and_held_out(
    stats: Stats, rows: pa.Table, lengths: np.ndarray
) -> None:
    assert [item.path for item in stats.inputs] == ["a.parquet", "b.parquet"]
    assert stats.more is None
    for index, item in enumerate(stats.inputs):
        mine = rows["input"].to_numpy() == index
        assert (item.documents, item.tokens) == (mine.sum(), lengths[mine].sum())
        assert item.text_bytes == rows["text_bytes"].to_numpy()[mine].sum()
    assert [item.dropped for item in stats.inputs] == [{"empty": 2}, {}]
    assert sum(item.held_out for item in stats.inputs) == stats.other_split
    one = collect(stats.target, top=1)
    assert [item.path for item in one.inputs] == ["a.parquet"]
    assert (one.more.documents, one.more.tokens) == (
        stats.inputs[1].documents,
        stats.inputs[1].tokens,
    )


def test_lengths_are_counted_exactly(stats: Stats, lengths: np.ndarray) -> None:
    assert (stats.shortest, stats.longest) == (lengths.min(), lengths.max())
    for bins in (stats.histogram, stats.octaves):
        for one in bins:
            inside = lengths[(lengths >= one.first) & (lengths <= one.last)]
            assert (one.documents, one.tokens) == (len(inside), inside.sum())
        assert sum(one.documents for one in bins) == len(lengths)
    assert stats.quantiles["0.5"] == pytest.approx(np.quantile(lengths, 0.5), rel=0.05)


def test_kept_columns_have_their_values_or_their_spread(stats: Stats, rows: pa.Table) -> None:
    language, score, edited = stats.columns
    exact = Counter(value for value in rows["language"].to_pylist() if value is not None)
    assert dict(language.top or []) == exact
    assert (language.distinct, language.nulls) == (3, rows["language"].null_count)
    values = rows["score"].to_numpy()
    assert (score.least, score.most) == (values.min(), values.max())
    assert score.middle == pytest.approx(np.quantile(values, 0.5, method="lower"), rel=0.0101)
    assert dict(edited.top or [])["true"] == sum(rows["edited"].to_pylist())


def test_duplicates_are_of_both_splits_counted_or_known_from_the_run(
    stats: Stats, folder: Path, tmp_path: Path
) -> None:
    assert stats.duplicates == 30
    assert stats.duplicate_bytes == sum(len(text.encode()) for text in texts(30))
    manifest = json.loads((folder / "out" / "manifest.json").read_bytes())
    del manifest["tools"]
    shutil.copytree(folder / "out", tmp_path, dirs_exist_ok=True)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    held = Dataset.open(str(folder / "out" / "validation")).documents
    copies = collect(str(tmp_path)).duplicates  # of this split alone
    assert 30 - held <= copies <= 30
    hashes = [
        (row["content_hash"], row["text_bytes"])
        for i in range(len(Dataset.open(str(tmp_path)).manifest.shards))
        for row in Dataset.open(str(tmp_path)).shard(i).docs.table(KEYS).to_pylist()
    ]
    assert copies == len(hashes) - len(set(hashes))


def test_extremes_are_the_documents_with_fewest_and_most_tokens_a_byte(
    stats: Stats, rows: pa.Table, lengths: np.ndarray
) -> None:
    sizes = rows["text_bytes"].to_numpy()
    ratio = {
        n: (lengths[n] - 1) / sizes[n] for n in np.flatnonzero(sizes >= EXTREME_BYTES).tolist()
    }
    assert [item.document for item in stats.few] == sorted(ratio, key=lambda n: ratio[n])[:5]
    assert [item.document for item in stats.many] == sorted(ratio, key=lambda n: -ratio[n])[:5]
    assert {"a" * 280, ("\u4f60\u597d" * 60)} & {item.text for item in stats.few + stats.many}


def test_the_held_out_split_has_statistics_of_its_own(folder: Path) -> None:
    held = collect(str(folder / "out" / "validation"))
    assert held.split == "validation"
    assert held.documents == Dataset.open(str(folder / "out" / "validation")).documents


def test_a_jsonl_dataset_without_columns_and_long_documents_has_statistics(
    project: Project,
) -> None:
    project.make([project.write("a.jsonl", ["x", "y z"])], "o")
    stats = collect(str(project / "o"))
    assert (stats.columns, stats.few, stats.many) == ([], [], [])
