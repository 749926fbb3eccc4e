"""Statistics: what is counted is what is there, for inputs, lengths, columns, drops and copies."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.cli import cli
from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, ResourceError, printable
from olm_data.stats.count import EXTREME_BYTES, Stats, collect
from olm_data.stats.page import write_stats_page
from olm_data.stats.text import bar, columns, percent, shortened, stats_lines

KEYS = ["content_hash", "text_bytes"]
LANGUAGES = ["en", "de", "<b>$x$", None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """Two parquet inputs with kept columns, copies, drops and a held-out split."""
    folder = tmp_path_factory.mktemp("stats")
    rows = [*texts(150), *texts(30), "", " ", "a" * 500, "\u4f60\u597d" * 60]
    rng = np.random.default_rng(1)
    for name, text in (("a", rows), ("b", texts(40, 1000))):
        table = {
            "text": text,
            "language": [LANGUAGES[n % 4] for n in range(len(text))],
            "score": rng.lognormal(size=len(text)),
            "edited": [n % 3 == 0 for n in range(len(text))],
        }
        pq.write_table(pa.table(table), folder / f"{name}.parquet", row_group_size=50)
    inputs = [folder / "a.parquet", folder / "b.parquet"]
    options = {"keep": ["language", "score", "edited"], "holdout": "1/8", "shard_tokens": 500}
    make_dataset(inputs, tiny_tokenizer, folder / "out", **options)
    return folder


@pytest.fixture(scope="module")
def stats(folder: Path) -> Stats:
    return collect(str(folder / "out"))


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
    assert stats.documents_in == 224
    assert stats.dropped == {"empty": 2}
    assert stats.other_split == 222 - stats.documents > 0
    assert stats.tokens_per_byte == totals.tokens / totals.text_bytes


def test_inputs_have_their_documents_tokens_bytes_drops_and_held_out(
    stats: Stats, rows: pa.Table, lengths: np.ndarray
) -> None:
    assert [item.path for item in stats.inputs] == ["a.parquet", "b.parquet"]
    assert stats.more is None
    for index, item in enumerate(stats.inputs):
        mine = rows["input"].to_numpy() == index
        assert item.documents == mine.sum()
        assert item.tokens == lengths[mine].sum()
        assert item.text_bytes == rows["text_bytes"].to_numpy()[mine].sum()
    assert [item.dropped for item in stats.inputs] == [{"empty": 2}, {}]
    assert sum(item.held_out for item in stats.inputs) == stats.other_split
    one = collect(stats.target, top=1)
    assert [item.path for item in one.inputs] == ["a.parquet"]
    assert one.more is not None
    assert (one.more.documents, one.more.tokens) == (
        stats.inputs[1].documents,
        stats.inputs[1].tokens,
    )


def test_lengths_are_counted_exactly(stats: Stats, lengths: np.ndarray) -> None:
    assert (stats.shortest, stats.longest) == (lengths.min(), lengths.max())
    for bins in (stats.histogram, stats.octaves):
        for low, high, documents, tokens in bins:
            inside = lengths[(lengths >= low) & (lengths <= high)]
            assert (documents, tokens) == (len(inside), inside.sum())
        assert sum(documents for _, _, documents, _ in bins) == len(lengths)
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
    assert any("this is the held-out split" in line for line in stats_lines(held, 100))


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_text_fits_the_width_and_holds_no_control_characters(stats: Stats, width: int) -> None:
    lines = stats_lines(stats, width)
    assert all(cell_len(line) <= width for line in lines[1:])
    assert all(line.isprintable() for line in lines)
    assert "2 inputs" in lines


class Page(HTMLParser):
    """The text of a page and whatever a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.fetched = "", list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        self.fetched += [
            str(value)
            for name, value in attrs
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#")
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_shows_it_all_fetches_nothing_and_is_escaped(stats: Stats, tmp_path: Path) -> None:
    page = Page()
    source = write_stats_page(stats, str(tmp_path / "s.html")).read_text()
    page.feed(source)
    for part in ("Document lengths", "b.parquet", "dropped: empty", "Column language", "<b>$x$"):
        assert part in page.text
    assert "30 documents equal an earlier one" in page.text
    assert page.fetched == []
    assert "prefers-color-scheme: dark" in source
    assert "#010203" not in source
    with pytest.raises(ResourceError, match="does not exist"):
        write_stats_page(stats, str(tmp_path / "nowhere" / "s.html"))


def test_the_command_prints_text_json_and_a_page(folder: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(cli, ["stats", str(folder / "out")])
    assert "2 inputs" in shown.stdout
    assert f"next: olm-data show document {folder / 'out'} " in shown.stderr
    words = ["stats", str(folder / "out"), "--json", "--html", str(tmp_path / "s.html")]
    value = json.loads(CliRunner().invoke(cli, words).stdout)
    assert value["inputs"][0]["path"] == "a.parquet"
    assert set(value["histogram"][0]) == {"first", "last", "documents", "tokens"}
    assert (tmp_path / "s.html").is_file()
    with pytest.raises(InputError):
        collect(str(tmp_path))


def test_a_jsonl_dataset_without_columns_and_long_documents_has_statistics(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    make_dataset([write_jsonl(tmp_path / "a.jsonl", ["x", "y z"])], tiny_tokenizer, tmp_path / "o")
    stats = collect(str(tmp_path / "o"))
    assert (stats.columns, stats.few, stats.many) == ([], [], [])
    assert "1 input" in stats_lines(stats, 80)


@given(st.text(max_size=40).map(printable), st.integers(1, 50))
def test_a_shortened_name_fits_and_keeps_both_ends(text: str, width: int) -> None:
    short = shortened(text, width)
    assert cell_len(short) <= width
    assert short == text or "\u2026" in short


@given(st.floats(0, 1), st.integers(1, 80))
def test_a_bar_is_as_long_as_its_share(share: float, width: int) -> None:
    drawn = bar(share, width)
    assert abs(len(drawn) - share * width) <= 1
    assert bar(1.0, width) == "\u2588" * width
    assert bar(0.0, width) == ""


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_a_percentage_is_nothing_or_all_only_where_it_is_so(part: int, more: int) -> None:
    text = percent(part, part + more)
    assert (text == "0 %") == (part == 0)
    assert (text == "100 %") == (part > 0 and more == 0)


def test_columns_are_aligned_and_long_names_lose_their_middle() -> None:
    assert columns([("name", "1"), ("x" * 40, "22"), ("\u4f60" * 3, "3")], 30) == [
        "name" + " " * 24 + " 1",
        "x" * 12 + "\u2026" + "x" * 13 + "  22",
        "\u4f60" * 3 + " " * 22 + " 3",
    ]
