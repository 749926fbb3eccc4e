"""The verbs are functions with the options of the commands."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.html_page import HtmlPage
from support.project import Project
from support.runs import build_trainer
from support.tokenizing import make_dataset, texts, write_jsonl

import olm_data
import olm_train
from olm_data import Dataset, Lock, RowReader
from olm_data.errors import UsageError, ValidationError

TEXTS = texts(23)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Dataset:
    folder = tmp_path_factory.mktemp("u10")
    make_dataset([write_jsonl(folder / "a.jsonl", TEXTS)], tiny_tokenizer, folder / "out")
    return Dataset.open(str(folder / "out"))


def test_tokenize_and_mix_are_functions_with_the_options_of_the_commands(
    capsys: pytest.CaptureFixture[str], project: Project
) -> None:
    for name in "ab":
        project.write(f"{name}.jsonl", [f"{name} {text}" for text in TEXTS])
    options = {"tokenizer": project.tokenizer, "holdout": "0.2", "workers": 1, "dedup": "exact"}
    made = olm_data.tokenize(project / "*.jsonl", output=project.out, **options)
    held = Dataset.open(str(project.out / "validation"))
    found = {document.text for dataset in (made, held) for document in dataset}
    assert found == {f"{name} {text}" for text in TEXTS for name in "ab"}
    again = olm_data.tokenize(project / "*.jsonl", output=project.out, **options)
    assert again.digest == made.digest
    (project / "m.yaml").write_text(
        "version: 1\nseed: 1\nsequence_length: 8\npacking: concat\n"
        "sources: {a: {data: ./out}}\nstages: [{name: s, tokens: 64, weights: {a: 1}}]\n"
    )
    lock = olm_data.mix(project / "m.yaml")
    assert (lock.total_rows, Lock.read(project / "m.lock.json").digest) == (8, lock.digest)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hold_out": 0.1}, "did you mean 'holdout'?"),
        ({"dry_run": True}, "unknown field dry_run"),
        ({"special": "plane"}, "special is one of plain, allow, error, not 'plane'"),
        ({"holdout": 3}, "--holdout '3' is not a fraction"),
    ],
)
def test_an_option_that_there_is_not_is_refused(
    options: dict[str, object], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        olm_data.tokenize("x", tokenizer="gpt2", output=tmp_path / "o", **options)
    assert says in str(caught.value)


# The packages are pleasant from Python: names, numbers, documents and their texts.
def test_a_dataset_is_a_sequence_of_documents_with_their_texts(dataset: Dataset) -> None:
    assert len(dataset) == len(TEXTS)
    assert [document.text for document in dataset] == TEXTS
    assert dataset[-1].text == TEXTS[-1]
    assert [document.number for document in dataset[3:9:2]] == [3, 5, 7]
    with pytest.raises(IndexError):
        dataset[len(TEXTS)]


def test_reprs_say_numbers(dataset: Dataset, tiny_mixture: Path) -> None:
    said = repr(dataset)
    for part in (f"{dataset.tokens:,} tokens", "23 documents", "1 shards", dataset.digest[:12]):
        assert part in said
    shown = f"<Document 2 'a-2': {len(dataset[2].tokens)} tokens, a.jsonl, byte "
    assert repr(dataset[2]).startswith(shown)
    lock = Lock.read(tiny_mixture)
    assert f"{lock.total_rows:,} rows of 32 tokens, 2 sources, 2 stages, concat" in repr(lock)
    assert repr(lock) in repr(RowReader(lock))
    loader = olm_train.DataLoader(lock, global_batch_size=256, rank_microbatch_size=64)
    assert f"step 0 of {loader.steps}, rank 0 of 1" in repr(loader)


def test_notebooks_show_facts(dataset: Dataset, tiny_mixture: Path, tmp_path: Path) -> None:
    lock = Lock.read(tiny_mixture)
    trainer = build_trainer(tiny_mixture, tmp_path / "<b>&")

    def shown(part: Any) -> str:
        page = HtmlPage(part._repr_html_())
        assert page.fetched == []
        return "\n".join(" ".join(line.split()) for line in "".join(page.text).splitlines())

    for fact in (f"tokens {dataset.tokens:,}", "documents 23", f"digest {dataset.digest}"):
        assert f"\n{fact}\n" in f"{shown(dataset)}\n"
    told = [f"digest {lock.digest}", f"rows {lock.total_rows:,}"]
    told += [f"sources {source.name}: {source.tokens:,} tokens" for source in lock.sources]
    for fact in told:
        assert fact in shown(lock).splitlines()
    for fact in (f"save folder {tmp_path}/<b>&", "steps 24", f"mixture {lock.digest}"):
        assert fact in shown(trainer).splitlines()


def test_a_text_needs_the_tokenizer_of_the_dataset(dataset: Dataset, project: Project) -> None:
    source = project.write("a.jsonl", TEXTS[:3])
    made = project.out
    project.make([source], made)
    (made / "tokenizer.json").unlink()
    with pytest.raises(ValidationError, match="json is missing"):
        _ = Dataset.open(str(made))[0].text


@pytest.mark.parametrize("package", [olm_data, olm_train])
def test_public_names_are_listed_and_typed(package: object, repository: Path) -> None:
    names = dir(package)
    assert set(names) == set(package.__all__)  # type: ignore[attr-defined]
    assert all(getattr(package, name) is not None for name in names)
    assert (repository / package.__name__ / "py.typed").is_file()  # type: ignore[attr-defined]
    settings = tomllib.loads((repository / "pyproject.toml").read_text())
    data = settings["tool"]["setuptools"]["package-data"]
    assert "py.typed" in data[package.__name__]  # type: ignore[attr-defined]
