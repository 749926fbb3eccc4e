"""Sums of losses by document, column, length and place: the same as a loop over labels finds."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.project import Project
from support.tokenizing import make_dataset

from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError, ValidationError
from olm_data.rows.label_groups import MOST_GROUPS, NONE, OTHER, LabelGroups
from olm_data.rows.reader import DatasetRows

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
