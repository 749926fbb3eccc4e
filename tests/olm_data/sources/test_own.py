"""Sources and filters of one's own are used as ours are, and imported for the user alone."""

from __future__ import annotations

import io
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.adding import add_to
from support.command import REPOSITORY, olm_data
from support.inline_runner import InlineRunner
from support.inputs import lines, write
from support.project import Project
from support.reading import read_source, resolve_source
from support.tokenizing import digests, make_dataset

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.job import JobFile
from olm_data.errors import ConflictError, InputError, OlmError, UsageError, ValidationError
from olm_data.extensions.slurm.runner import batch_script
from olm_data.extensions.text_stream.documents import ReadingOrder, Slot, named_corpus
from olm_data.extensions.verify.datasets import verify
from olm_data.extensions.verify.deep import find_inputs
from olm_data.progress import Progress
from olm_data.runners.local import LocalRunner
from olm_data.sources import own, own_filter
from olm_data.storage.store import Store
from olm_data.tokenization.recipe import read_recipe
from olm_data.tokenization.request import prepare
from olm_data.tokenization.stored_job import load_job
from olm_data.tokenization.tokenize import tokenize

MODULE = "support.own_text"


EXTRA: dict[str, str] = {}


"""Environment of the commands."""


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    folder.mkdir()
    for name in ("one", "two", "three"):
        (folder / f"{name}.book").write_text(
            "".join(f"book {name} line {n} and on\n" for n in range(40)) + "\n"
        )
    return folder


def test_its_parts_are_inputs_and_its_rows_documents_with_ids_and_columns(books: Path) -> None:
    plan = resolve_source(source=f"{MODULE}:Chapters", root=str(books), keep=["length"])
    assert [item.path for item in plan.inputs] == [
        f"{MODULE}:Chapters,root={books}/{name}.book" for name in ("one", "three", "two")
    ]
    read = read_source(
        source=f"{MODULE}:Chapters", root=str(books), subset="two", where="length > 22"
    )
    assert read.texts == [f"book two line {n} and on" for n in range(10, 40)]
    assert read.ids[0] == "two.book:10"
    plain = read_source(source=f"{MODULE}:Plain")
    assert plain.texts == [f"text {part} {n}" for part in "ab" for n in range(300)]
    assert sorted(drop.reason for drop in plain.drops) == ["empty"] * 2 + ["invalid_utf8"] * 2


@pytest.mark.parametrize(
    ("name", "options", "error", "said"),
    [
        ("Plain", {"subset": "x"}, UsageError, "--subset has no meaning here"),
        ("Chapters", {}, UsageError, "root"),
        ("Failing", {}, InputError, "fails: ConnectionError: no such shelf"),
        ("Numbers", {}, InputError, "of type int, neither a text nor a record"),
        ("Unfinished", {}, UsageError, "has no method rows"),
        ("Slow", {}, UsageError, "not a subclass of OwnSource"),
        ("Nothing", {}, UsageError, "has no class Nothing"),
    ],
)
def test_what_is_wrong_with_it_is_said(
    name: str, options: dict[str, str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        read_source(source=f"{MODULE}:{name}", **options)


def test_a_package_gives_it_a_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(group: str, name: str) -> str | None:
        return f"{MODULE}:Plain" if (group, name) == (own.GROUP, "shelf") else None

    monkeypatch.setattr(own, "path_of", entry)
    assert resolve_source(source="shelf").inputs[0].path == f"{MODULE}:Plain/a"


def test_it_is_a_corpus_of_a_text_data_set(books: Path, tiny_tokenizer: Path) -> None:
    from support.texts import given

    corpus = named_corpus(f"{MODULE}:Chapters", tiny_tokenizer, root=str(books), subset="one")
    assert given(corpus, Slot(), ReadingOrder())[:2] == [
        "book one line 0 and on",
        "book one line 1 and on",
    ]


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the module `my_shelf` makes wherever it is imported."""
    mark = tmp_path / "imported"
    code = REPOSITORY / "tests/support/own_text.py"
    lab = tmp_path / "lab"
    lab.mkdir()
    (lab / "my_shelf.py").write_text(f"{code.read_text()}\nopen({str(mark)!r}, 'a').close()\n")
    monkeypatch.setitem(EXTRA, "PYTHONPATH", f"{REPOSITORY}:{lab}")
    return mark


def made(
    books: Path, output: Path, tokenizer: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    return olm_data(
        *("tokenize", "--source", "my_shelf:Chapters", "--root", str(books)),
        *("--tokenizer", str(tokenizer), "--output", str(output), "--workers", "2", *more),
        extra=EXTRA,
    )


@pytest.mark.slow
def test_workers_elsewhere_import_it_when_they_are_told_to_trust_it(
    books: Path, tmp_path: Path, tiny_tokenizer: Path, mark: Path
) -> None:
    whole, begun = tmp_path / "whole", tmp_path / "begun"
    assert made(books, whole, tiny_tokenizer).returncode == 0
    dataset = Dataset.open(str(whole))
    assert dataset.documents == 120
    assert dataset.manifest.inputs[0].path.startswith("my_shelf:Chapters,root=")
    # a run that was killed before its last tasks: the manifest and a shard are gone
    assert made(books, begun, tiny_tokenizer).returncode == 0
    for name in begun.glob("shard-00001*"):
        name.unlink()
    (begun / "manifest.json").unlink()
    mark.unlink()
    refused = olm_data("work", str(begun), "--tasks", "0-2", extra=EXTRA)
    assert refused.returncode == 4, refused.stderr
    assert "names a class of somebody's own: my_shelf:Chapters" in refused.stderr
    assert "--trust" in refused.stderr
    assert not mark.exists(), "nothing was imported"
    done = olm_data("work", str(begun), "--tasks", "0-2", "--trust", extra=EXTRA)
    assert (done.returncode, done.stdout[:12]) == (0, "1 tasks done"), done.stderr
    assert mark.exists()
    assert made(books, begun, tiny_tokenizer).returncode == 0
    assert digests(begun) == digests(whole)


@pytest.mark.slow
def test_a_dataset_that_names_it_is_opened_without_importing_it(
    books: Path, tmp_path: Path, tiny_tokenizer: Path, mark: Path
) -> None:
    output = tmp_path / "tokens"
    assert made(books, output, tiny_tokenizer).returncode == 0
    job = JobFile.read_from(Store(str(output)))
    assert {item.format for item in job.inputs} == {"own"}
    mark.unlink()
    more = tmp_path / "more.jsonl"
    more.write_text('{"text": "one more"}\n')
    mixture = tmp_path / "mix.yaml"
    mixture.write_text(
        "version: 1\nseed: 1\nsequence_length: 16\n"
        f"sources: {{books: {{data: {output}, max_epochs: 1}}}}\n"
        "stages: [{name: main, epochs: {books: 1}}]\n"
    )
    for words in (
        ("verify", str(output)),
        ("show", "document", str(output), "0"),
        ("stats", str(output)),
        ("status", str(output)),
        ("mix", str(mixture)),
        ("add", str(output), str(more), "--id-column", "none", "--workers", "1"),
        ("verify", str(output)),
    ):
        done = olm_data(*words, extra=EXTRA)
        assert done.returncode == 0, (words, done.stderr)
        assert not mark.exists(), words
    refused = olm_data("verify", str(output), "--deep", extra=EXTRA)
    assert refused.returncode == 4, refused.stderr
    assert "--trust" in refused.stderr
    assert not mark.exists()
    done = olm_data("verify", str(output), "--deep", "--trust", "--sample", "100%", extra=EXTRA)
    assert done.returncode == 0, done.stderr
    assert mark.exists()


def test_it_is_a_field_of_a_recipe_and_its_job_wants_trust(
    books: Path, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'source: "{MODULE}:Chapters"\nroot: books\ntokenizer: {tiny_tokenizer}\n')
    output = str(tmp_path / "tokens")
    read = read_recipe([str(recipe)], {"output": output, "encoder": "hf"})
    progress = Progress("tokenize", stream=io.StringIO())
    made = tokenize(prepare(read, read.inputs), runner=InlineRunner(), progress=progress)
    assert made.manifest.totals.documents == 120
    with pytest.raises(InputError, match="names a class of somebody's own"):
        load_job(output)
    job = load_job(output, trust=True)
    assert job.own_parts
    assert "--trust" in batch_script(output, "tasks", 1, trust=job.own_parts)
    plan = job.plan
    with pytest.raises(InputError, match="names a class of somebody's own"):
        find_inputs(Store(output), plan, None)
    assert find_inputs(Store(output), plan, None, trust=True) == list(job.inputs)
    named = msgspec.structs.replace(
        JobFile.read_from(Store(output)), inputs=(), encoder="nobody.has:It"
    )
    Store(output).put("job.json", named.encode())
    with pytest.raises(InputError, match=r"somebody's own: nobody\.has:It"):
        load_job(output)


KEEP = """
def keep(record):
    if len(record["text"].split()) < 4:
        return "too short"
    if record["id"] == "7":
        return "seven"
    return record["score"] is not None and record["score"] > 2

def numbers(record): return 3
def many(record): return "reason " + record["id"]
def fails(record): return record["nothing"]
constant = 3
"""


ROWS = [
    {"id": str(n), "text": "word " * (n % 9), "score": None if n % 5 == 0 else n % 4}
    for n in range(1, 400)
]


EXPECTED = Counter(
    "empty"
    if row["id"] and int(row["id"]) % 9 == 0
    else "rejected: too short"
    if int(row["id"]) % 9 < 4
    else "rejected: seven"
    if row["id"] == "7"
    else "rejected"
    if row["score"] is None or row["score"] <= 2
    else "kept"
    for row in ROWS
)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module `filter_lab` that is importable here and in workers."""
    folder = tmp_path / "lab"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    monkeypatch.delitem(__import__("sys").modules, "filter_lab", raising=False)
    return write(folder / "filter_lab.py", KEEP.encode())


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl", lines(ROWS))


def test_what_it_leaves_out_is_counted_by_reason_after_the_condition(lab: Path, rows: Path) -> None:
    read = read_source(str(rows), filter="filter_lab:keep", keep=["score"])
    found = Counter({"kept": len(read.texts), "empty": len(read.drops)}) + read.skipped
    assert found == EXPECTED
    both = read_source(str(rows), filter="filter_lab:keep", keep=["score"], where="score >= 3")
    assert both.texts == read.texts
    assert "rejected" not in both.skipped
    assert (both.skipped + Counter()).keys() == {
        "filtered",
        "rejected: too short",
        "rejected: seven",
    }


def filtered(rows: Path, tokenizer: Path, output: Path, runner: Any = None) -> Any:
    options = {"filter": "filter_lab:keep", "keep": ("score",), "shard_tokens": 100}
    return make_dataset([rows], tokenizer, output, runner=runner or InlineRunner(), **options)


def test_workers_apply_it_and_a_run_goes_on_with_the_same_source_only(
    lab: Path, rows: Path, project: Project
) -> None:
    whole = filtered(rows, project.tokenizer, project / "whole")
    assert Counter(whole.manifest.dropped, kept=whole.manifest.totals.documents) == EXPECTED
    assert verify(str(project / "whole")).ok
    filtered(rows, project.tokenizer, project / "two", LocalRunner(2))
    assert digests(project / "two") == digests(project / "whole")
    (project / "two" / "manifest.json").unlink()
    with pytest.raises(InputError, match="somebody's own: filter_lab:keep"):
        load_job(str(project / "two"))
    job = load_job(str(project / "two"), trust=True)
    assert job.own_parts
    lab.write_text(KEEP.replace("> 2", "> 1"))
    with pytest.raises(ConflictError, match=r"filter: .*filter_lab:keep"):
        filtered(rows, project.tokenizer, project / "two")
    for name in project.folder.glob("two/shard-00000*"):
        name.unlink()
    own_filter._function.cache_clear()
    with pytest.raises(ValidationError, match="another source here"):
        job.run(0, lambda **counts: None)


def test_an_addition_names_it_again(lab: Path, rows: Path, project: Project) -> None:
    filtered(rows, project.tokenizer, project.out)
    more = write(project / "more.jsonl", lines([*ROWS[:50], {"id": "x", "text": "a b c d e"}]))
    with pytest.raises(UsageError, match="made with the filter filter_lab:keep") as raised:
        add_to(project.out, more)
    assert raised.value.fix == "--filter filter_lab:keep"
    before = project.open().documents
    after = add_to(project.out, more, filter="filter_lab:keep").manifest.totals.documents
    assert after - before == sum(row["id"] != "7" for row in ROWS[:50] if row_is_kept(row))


def row_is_kept(row: dict[str, Any]) -> bool:
    return int(row["id"]) % 9 >= 4 and (row["score"] or 0) > 2


@pytest.mark.parametrize(
    ("path", "error", "said"),
    [
        ("filter_lab:numbers", InputError, "the filter filter_lab:numbers returns 3"),
        ("filter_lab:many", InputError, "more than 100 reasons"),
        ("filter_lab:fails", InputError, "fails: KeyError: 'nothing'"),
        ("filter_lab:constant", UsageError, "filter_lab:constant is no function"),
        ("filter_lab:kep", UsageError, "has no function kep"),
        ("math:sqrt", UsageError, "no source in Python"),
    ],
)
def test_what_is_wrong_with_a_filter_is_said(
    path: str, error: type[OlmError], said: str, lab: Path, rows: Path
) -> None:
    with pytest.raises(error, match=said):
        read_source(str(rows), filter=path)
