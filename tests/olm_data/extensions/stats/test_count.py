"""Statistics: sketches within their bounds, counts equal to a plain loop, text and page."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.html_page import HtmlPage
from support.project import Project
from support.tokenizing import texts

from olm_data.cli import cli
from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, ResourceError
from olm_data.extensions.stats.count import (
    EXTREME_BYTES,
    Frequent,
    LogHistogram,
    Quantiles,
    Stats,
    TopK,
    collect,
)
from olm_data.extensions.stats.page import percent, write_stats_page

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


sizes = st.lists(st.integers(1, 2**50), max_size=60)


@given(sizes, st.integers(0, 60))
def test_a_histogram_counts_and_sums_every_value_once_whole_or_in_parts(
    values: list[int], cut: int
) -> None:
    whole, first, second = LogHistogram(), LogHistogram(), LogHistogram()
    whole.add(np.array(values, np.int64))
    first.add(np.array(values[:cut], np.int64))
    second.add(np.array(values[cut:], np.int64))
    first.merge(second)
    assert whole.bins() == first.bins()
    for octaves in (False, True):
        bins = whole.bins(octaves=octaves)
        assert sum(count for _, _, count, _ in bins) == len(values)
        assert sum(total for *_, total in bins) == sum(values)
        for low, high, count, total in bins:
            inside = [value for value in values if low <= value <= high]
            assert (count, total) == (len(inside), sum(inside))
        for (_, high, *_), (low, *_) in pairwise(bins):
            assert low == high + 1


def test_octaves_are_powers_of_two() -> None:
    histogram = LogHistogram()
    histogram.add(np.array([1, 2, 3, 4, 7, 8, 1023, 1024]))
    bins = histogram.bins(octaves=True)
    assert bins[:4] == [(1, 1, 1, 1), (2, 3, 2, 5), (4, 7, 2, 11), (8, 15, 1, 8)]
    assert bins[-2:] == [(512, 1023, 1, 1023), (1024, 2047, 1, 1024)]
    assert LogHistogram().bins() == []


numbers = st.one_of(
    st.integers(-(2**62), 2**62).map(float), st.floats(allow_nan=False, allow_infinity=False)
)


@given(st.lists(numbers, min_size=1, max_size=80), st.floats(0, 1), st.integers(0, 80))
def test_quantiles_are_within_one_percent_whole_or_in_parts(
    values: list[float], share: float, cut: int
) -> None:
    sketch, other = Quantiles(), Quantiles()
    sketch.add(np.array(values[:cut]))
    other.add(np.array(values[cut:]))
    sketch.merge(other)
    exact = float(np.sort(values)[int(np.floor(share * (len(values) - 1)))])
    assert sketch.at(share) == pytest.approx(exact, rel=0.0101, abs=1e-320)
    assert (sketch.least, sketch.most, sketch.count) == (min(values), max(values), len(values))


def test_numbers_that_are_none_are_counted_apart() -> None:
    sketch = Quantiles()
    sketch.add(np.array([np.nan, np.inf, 3.0]))
    assert (sketch.count, sketch.odd, sketch.at(0.5)) == (1, 2, 3.0)
    assert Quantiles().at(0.5) == 0


@given(
    st.lists(st.text("abcdef", max_size=2), max_size=200), st.integers(1, 12), st.integers(0, 200)
)
def test_frequent_values_are_never_overcounted_nor_lost(
    values: list[str], most: int, cut: int
) -> None:
    summary, other = Frequent(most), Frequent(most)
    summary.add(Counter(values[:cut]))
    other.add(Counter(values[cut:]))
    summary.merge(other)
    exact, found = Counter(values), dict(summary.top(10**6))
    assert summary.total == len(values)
    assert len(found) <= most
    for value, count in exact.items():
        assert count - summary.error <= found.get(value, 0) <= count
    assert summary.error * (most + 1) <= len(values)
    if len(exact) <= most:
        assert found == exact
        assert summary.distinct == len(exact)


@given(
    st.lists(st.integers(0, 5).map(float), max_size=100), st.integers(1, 10), st.integers(0, 100)
)
def test_the_k_smallest_are_exact_and_ties_go_to_the_lower_number(
    keys: list[float], k: int, cut: int
) -> None:
    top, other = TopK(k), TopK(k)
    where = np.arange(len(keys))
    top.add(np.array(keys[cut:]), where[cut:])
    other.add(np.array(keys[:cut]), where[:cut])
    top.merge(other)
    assert top.items() == sorted(zip(keys, where.tolist(), strict=True))[:k]


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_a_percentage_is_nothing_or_all_only_where_it_is_so(part: int, more: int) -> None:
    text = percent(part, part + more)
    assert (text == "0 %") == (part == 0)
    assert (text == "100 %") == (part > 0 and more == 0)


def test_the_command_prints_text_json_and_a_page(folder: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(cli, ["stats", str(folder / "out")])
    assert re.search(r"^  a.parquet .* 2 empty ", shown.stdout, re.M)
    assert f"next: olm-data show document {folder / 'out'} " in shown.stderr
    words = ["stats", str(folder / "out"), "--json", "--html", str(tmp_path / "s.html")]
    value = json.loads(CliRunner().invoke(cli, words).stdout)
    assert value["inputs"][0]["path"] == "a.parquet"
    assert set(value["histogram"][0]) == {"first", "last", "documents", "tokens"}
    assert (tmp_path / "s.html").is_file()
    with pytest.raises(InputError):
        collect(str(tmp_path))


def test_the_page_shows_it_all_fetches_nothing_and_is_escaped(stats: Stats, tmp_path: Path) -> None:
    source = write_stats_page(stats, str(tmp_path / "s.html")).read_text()
    page = HtmlPage(source)
    for part in ("Document lengths", "b.parquet", "dropped: empty", "Column language", "<b>$x$"):
        assert part in "".join(page.text)
    assert "30 documents equal an earlier one" in "".join(page.text)
    assert page.fetched == []
    assert "prefers-color-scheme: dark" in source
    assert "#010203" not in source
    with pytest.raises(ResourceError, match="does not exist"):
        write_stats_page(stats, str(tmp_path / "nowhere" / "s.html"))
