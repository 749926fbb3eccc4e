"""All formats alike: what a condition takes, one dataset whatever the workers; standard input."""

from __future__ import annotations

import csv
import io
import json
import lzma
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.inputs import lines, write_rows
from support.project import Project
from support.reading import read_source, resolve_source
from support.tokenizing import digests, texts

from olm_data.cli import cli
from olm_data.dataset.manifest import read_manifest
from olm_data.errors import ConflictError, InputError, UsageError
from olm_data.sources import plan_units, read_units
from olm_data.sources.standard_input import spooled
from olm_data.storage import disk
from olm_data.storage.store import Store


def test_arrays_and_tables_make_the_same_dataset_whatever_the_workers_and_verify_deeply(
    project: Project,
) -> None:
    from olm_data.extensions.verify.datasets import verify
    from olm_data.extensions.verify.deep import Deep

    folder = project / "in"
    folder.mkdir()
    documents = texts(60)
    (folder / "a.json").write_bytes(
        json.dumps([{"text": text} for text in documents[:20]]).encode()
    )
    out = io.StringIO()
    csv.writer(out, delimiter=";").writerows([["text"], *([text] for text in documents[20:40])])
    (folder / "b.csv").write_bytes(out.getvalue().encode())
    (folder / "c.jsonl.xz").write_bytes(
        lzma.compress(lines([{"text": text} for text in documents[40:]]))
    )
    for name in ("one", "two"):
        done = project.make([folder], name, delimiter=";")
    assert done.manifest.totals.documents == 60
    assert digests(project / "one") == digests(project / "two")
    report = verify(str(project / "one"), deep=Deep(root=str(folder), share=1, seed=0))
    assert report.ok
    assert not report.unproved


ROWS: list[dict[str, Any]] = [
    {
        "id": f"r{k}",
        "text": f"document {k}",
        "score": None if k % 7 == 0 else k / 4,
        "language": ["en", "de", None][k % 3],
        "good": k % 2 == 0,
    }
    for k in range(60)
]


FORMATS = [".parquet", ".arrow", ".feather", ".jsonl", ".jsonl.gz"]


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("target", [1, 1 << 30])
def test_every_format_takes_the_same_records_from_the_same_places(
    tmp_path: Path, ending: str, target: int
) -> None:
    path = write_rows(tmp_path, ending, ROWS)
    whole = read_source(path)
    read = read_source(
        path, where="score > 5 and (language == 'en' or not good)", target_bytes=target
    )
    taken = [
        k
        for k, row in enumerate(ROWS)
        if (row["score"] or 0) > 5 and (row["language"] == "en" or not row["good"])
    ]
    assert 5 < len(taken) < 50
    assert read.ids == [f"r{k}" for k in taken]
    assert read.places == [whole.places[k] for k in taken]
    assert read.skipped == {"filtered": 60 - len(taken)}


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "text": st.sampled_from(["a", "b c", "", None]),
                "n": st.none() | st.integers(-3, 3),
                "s": st.none() | st.sampled_from(["x", "y"]),
            }
        ),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from(["n > 0", "not (n == 1 or s == 'x')", "n is None", "s in ['y'] and n < 2"]),
)
def test_all_formats_agree_on_what_is_taken_filtered_and_dropped(
    tmp_path: Path, rows: list[dict[str, Any]], where: str
) -> None:
    rows = [{"text": "t", "n": 0, "s": "z"}, *rows]  # each column has a type
    seen = []
    for ending in FORMATS:
        path = write_rows(tmp_path, ending, rows)
        plan = resolve_source([str(path)], where=where)
        units = plan_units(0, plan.inputs[0], plan.options, 1)
        counts: Counter[str] = Counter()
        texts = []
        for batch in read_units(plan.inputs, units, plan.options):
            counts.update(drop.reason for drop in batch.dropped)
            counts.update({reason: n for (_, reason), n in batch.skipped.items()})
            texts += [batch.text(k) for k in range(batch.documents)]
            assert batch.rows_in == batch.documents + len(batch.dropped) + sum(
                batch.skipped.values()
            )
        assert len(texts) + counts.total() == len(rows)
        seen.append((texts, counts))
    assert all(one == seen[0] for one in seen)


def test_a_field_that_a_record_lacks_is_null(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one", "n": 1}\n{"text": "two"}\n{"text": "three", "n": null}\n')
    assert read_source(path, where="n is None").texts == ["two", "three"]
    assert read_source(path, where="n != 2").texts == ["one"]


def test_a_column_that_only_later_files_lack_is_null_there(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one"], "n": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["two"]}), tmp_path / "b.parquet")
    assert read_source(tmp_path, where="n is None").texts == ["two"]
    assert read_source(tmp_path, where="n == 1").skipped == {"filtered": 1}


@pytest.mark.parametrize("ending", FORMATS)
def test_an_unknown_column_is_refused_with_the_nearest_and_all(tmp_path: Path, ending: str) -> None:
    path = write_rows(tmp_path, ending, ROWS)
    with pytest.raises(InputError, match="no column 'langage'") as caught:
        resolve_source([str(path)], where="langage == 'en'")
    assert "language" in str(caught.value.fix)
    assert "score" in str(caught.value.why)


@pytest.mark.parametrize("ending", FORMATS)
def test_a_comparison_with_the_wrong_kind_of_value_is_refused(tmp_path: Path, ending: str) -> None:
    path = write_rows(tmp_path, ending, ROWS)
    with pytest.raises(InputError, match="cannot decide `score == 'high'`"):
        resolve_source([str(path)], where="score == 'high' or good")


def test_a_later_file_of_another_type_is_refused_not_left_out_in_silence(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one"], "n": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["two"], "n": ["1"]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="the column holds string") as caught:
        read_source(tmp_path, where="n == 1")
    assert caught.value.where == "b.parquet"


def test_text_files_have_no_columns_to_choose_by(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    path = write_rows(tmp_path, ".jsonl", ROWS)
    for inputs in ([tmp_path / "a.txt"], [path, tmp_path / "a.txt"]):
        with pytest.raises(UsageError, match="text files"):
            resolve_source([str(item) for item in inputs], where="score == 1")


def test_batches_are_bounded_by_bytes_in_a_row_group_of_unequal_texts(tmp_path: Path) -> None:
    texts = ["x" * n for n in (5, 6_000_000, 5, 3_000_000, 3_000_000, 5)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    read = read_source(tmp_path / "a.parquet")
    assert list(map(len, read.texts)) == list(map(len, texts))
    assert [p for _, p in read.places] == list(range(6))


def test_row_groups_without_a_match_are_passed_over_unread(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path, ".parquet", [row | {"score": float(k)} for k, row in enumerate(ROWS)]
    )
    footer = pq.ParquetFile(path).metadata
    with open(path, "r+b") as file:  # no page of the first five groups can be read any more
        file.seek(4)
        file.write(b"\xff" * (footer.row_group(5).column(0).dictionary_page_offset - 4))
    read = read_source(path, where="score >= 40", target_bytes=1)
    assert [position for _, position in read.places] == list(range(40, 60))
    assert read.skipped == {"filtered": 40}


def test_the_text_is_not_read_where_the_condition_leaves_nothing(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path, ".parquet", [row | {"score": float(k % 5)} for k, row in enumerate(ROWS)]
    )
    footer = pq.ParquetFile(path).metadata
    names = [footer.schema.column(c).path for c in range(footer.num_columns)]
    with open(path, "r+b") as file:
        for group in range(footer.num_row_groups):
            column = footer.row_group(group).column(names.index("text"))
            file.seek(column.dictionary_page_offset)
            file.write(b"\xff" * column.total_compressed_size)
    assert read_source(path, where="score == 2.5").skipped == {"filtered": 60}
    with pytest.raises(InputError):
        read_source(path, where="score == 2")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of unfinished work lie in a place of the test's own, so that what stays is seen."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    own = SimpleNamespace(
        mkdtemp=partial(tempfile.mkdtemp, dir=folder), gettempdir=lambda: str(folder)
    )
    monkeypatch.setattr(disk, "tempfile", own)
    return folder


def tokenize(data: bytes, tokenizer: Path, output: Path, *more: str) -> Result:
    words = ["tokenize", "-", "--tokenizer", str(tokenizer), "--output", str(output)]
    return CliRunner().invoke(cli, [*words, "--workers", "1", "--encoder", "hf", *more], input=data)


def test_standard_input_makes_the_documents_of_the_file_and_leaves_nothing_behind(
    temporary: Path, project: Project
) -> None:
    path = project.write("a.jsonl", texts(30))
    of_file = project.make([path], "file")
    done = tokenize(path.read_bytes(), project.tokenizer, project.out)
    assert done.exit_code == 0, done.output
    manifest = read_manifest(Store(project.out))
    assert [shard.sha256["tokens"] for shard in manifest.shards] == [
        shard.sha256["tokens"] for shard in of_file.manifest.shards
    ]
    assert list(temporary.iterdir()) == []
    again = tokenize(path.read_bytes(), project.tokenizer, project.out)
    assert "already complete" in again.output
    other = tokenize(b'{"text": "another"}\n', project.tokenizer, project.out)
    assert isinstance(other.exception, ConflictError)


@pytest.mark.usefixtures("temporary")
def test_an_interrupted_run_goes_on_with_the_same_text(
    monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    import olm_data.tokenization.tokenize as run

    data = project.write("a.jsonl", texts(30)).read_bytes()
    assert tokenize(data, project.tokenizer, project / "whole").exit_code == 0

    def killed(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "publish", killed)
        assert tokenize(data, project.tokenizer, project.out).exit_code != 0
    done = tokenize(data, project.tokenizer, project.out)
    assert done.exit_code == 0, done.output
    assert "1 shard kept" in done.output or "finished before" in done.output
    whole, out = digests(project / "whole"), digests(project.out)
    for name in whole:
        assert name == "job.json" or whole[name] == out[name], name


@pytest.mark.usefixtures("temporary")
@pytest.mark.parametrize(
    ("form", "data"),
    [("txt", b"a text"), ("csv", b"id,text\n1,a text\n"), ("json", b'[{"text": "a text"}]')],
)
def test_standard_input_has_any_format(form: str, data: bytes, project: Project) -> None:
    done = tokenize(data, project.tokenizer, project.out, "--format", form)
    assert done.exit_code == 0, done.output
    assert read_manifest(Store(project.out)).totals.documents == 1


@pytest.mark.usefixtures("temporary")
def test_standard_input_is_added_to_a_dataset(project: Project) -> None:
    path = project.write("a.jsonl", texts(5))
    project.make([path])
    for n in range(2):
        words = ["add", str(project.out), "-", "--workers", "1", "--encoder", "hf"]
        line = json.dumps({"id": str(n), "text": f"text {n}"}).encode() + b"\n"
        done = CliRunner().invoke(cli, words, input=line)
        assert done.exit_code == 0, (done.output, done.exception)
    assert read_manifest(Store(project.out)).totals.documents == 7


@pytest.mark.usefixtures("temporary")
@pytest.mark.parametrize(
    ("inputs", "form", "runner", "data", "kind"),
    [
        (("-",), None, "slurm", b"x", UsageError),
        (("-", "a.jsonl"), None, "local", b"x", UsageError),
        (("-",), "docx", "local", b"x", UsageError),
        (("a.jsonl",), "txt", "local", b"x", UsageError),
        (("-",), "txt", "local", b"", InputError),
    ],
)
def test_what_cannot_be_standard_input_is_refused(
    inputs: tuple[str, ...],
    form: str | None,
    runner: str,
    data: bytes,
    kind: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    with pytest.raises(kind), spooled(inputs, form, runner, print):
        pass
