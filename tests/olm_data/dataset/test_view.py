"""Which documents a view keeps, counted; what it cannot decide is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.forged import flip
from support.tokenizing import make_dataset, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.view import View, ViewInfo
from olm_data.errors import InputError, OlmError, UsageError, ValidationError
from olm_data.select.where import parse


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("view")
    lines = [{"text": f"text number {n}", "id": f"d{n % 8}", "score": n} for n in range(10)]
    text = write_jsonl(folder / "in.jsonl", [json.dumps(line).encode() for line in lines])
    make_dataset([text], tiny_tokenizer, folder / "out", keep=("score",), id_column="id")
    return folder / "out"


def scan(folder: Path, where: str | None) -> tuple[list[int], ViewInfo]:
    view = View(None if where is None else parse(where), None, "manifest.yaml:3")
    dataset = Dataset.open(str(folder))
    over, kept = view.over(dataset), []
    for number in range(len(dataset.manifest.shards)):
        shard = dataset.shard(number)
        for first, mask in over.chosen(number, shard):
            kept += (first + np.flatnonzero(mask)).tolist()
            over.count(np.diff(shard.ends, prepend=0)[first : first + len(mask)][mask])
    over.refuse_nothing("web")
    return kept, over.info()


def test_a_condition_keeps_what_it_is_true_for(folder: Path) -> None:
    kept, info = scan(folder, "score >= 3 and score < 6")
    assert kept == [3, 4, 5]
    assert (info.documents, info.left_by_where, info.ids) == (3, 7, 0)
    assert str(info) == "where (score >= 3) and (score < 6)"


@pytest.mark.parametrize(
    ("where", "error", "says"),
    [
        ("colour == 'red'", UsageError, "the documents have no column 'colour'"),
        ("score == 'red'", OlmError, "score"),
        ("score > 99", InputError, "no document of web is left: of 10, where leaves out 10"),
    ],
)
def test_what_cannot_be_decided_is_refused_where_it_was_asked(
    folder: Path, where: str, error: type[OlmError], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        scan(folder, where)
    assert "manifest.yaml:3" in str(caught.value)


def test_rows_that_are_not_the_manifests_choose_nothing(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    docs = next(copy.glob("*.docs.parquet"))
    flip(docs, 100)
    with pytest.raises(ValidationError, match="do not match their digest in the manifest"):
        scan(copy, "score > 3")
    docs.unlink()
    with pytest.raises(ValidationError, match="the file is missing"):
        scan(copy, "score > 3")
