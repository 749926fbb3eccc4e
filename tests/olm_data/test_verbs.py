"""The verbs are functions with the options of the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tokenizing import make_dataset, texts, write_jsonl

import olm_data
from olm_data import Dataset, Lock
from olm_data.errors import UsageError

TEXTS = texts(23)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Dataset:
    folder = tmp_path_factory.mktemp("u10")
    make_dataset([write_jsonl(folder / "a.jsonl", TEXTS)], tiny_tokenizer, folder / "out")
    return Dataset.open(str(folder / "out"))


def test_tokenize_and_mix_are_functions_with_the_options_of_the_commands(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {text}" for text in TEXTS])
    options = {"tokenizer": tiny_tokenizer, "holdout": "0.2", "workers": 1, "dedup": "exact"}
    made = olm_data.tokenize(tmp_path / "*.jsonl", output=tmp_path / "out", **options)
    held = Dataset.open(str(tmp_path / "out" / "validation"))
    found = {document.text for dataset in (made, held) for document in dataset}
    assert found == {f"{name} {text}" for text in TEXTS for name in "ab"}
    again = olm_data.tokenize(tmp_path / "*.jsonl", output=tmp_path / "out", **options)
    assert again.digest == made.digest
    (tmp_path / "m.yaml").write_text(
        "version: 1\nseed: 1\nsequence_length: 8\npacking: concat\n"
        "sources: {a: {data: ./out}}\nstages: [{name: s, tokens: 64, weights: {a: 1}}]\n"
    )
    lock = olm_data.mix(tmp_path / "m.yaml")
    assert (lock.total_rows, Lock.read(tmp_path / "m.lock.json").digest) == (8, lock.digest)
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
