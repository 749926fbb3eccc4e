"""A source of one's own is read as any other; its class is imported for the user alone."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import msgspec
import pytest
from support.command import REPOSITORY, olm_data
from support.inline_runner import InlineRunner
from support.reading import read_source, resolve_source
from support.tokenizing import digests

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.job import JobFile
from olm_data.errors import InputError, UsageError
from olm_data.extensions.slurm.runner import batch_script
from olm_data.extensions.text_stream.documents import ReadingOrder, Slot, named_corpus
from olm_data.extensions.verify.deep import find_inputs
from olm_data.progress import Progress
from olm_data.sources import own
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
