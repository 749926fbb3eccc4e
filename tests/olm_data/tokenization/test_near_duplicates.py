"""`--dedup minhash`: of texts that are nearly the same the first stays, however the run goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.adding import Stop, add_to
from support.inline_runner import InlineRunner
from support.project import Project
from support.tokenizing import digests, tokenized, write_jsonl

from olm_data.errors import UsageError
from olm_data.extensions.verify.datasets import verify
from olm_data.runners.local import LocalRunner
from olm_data.sources.base import DocumentBatch
from olm_data.sources.buffers import joined
from olm_data.tokenization.near_duplicates import find_band_keys, parse_bands, shingles

pytest.importorskip("rensa", reason="the extra dedup is not installed")
RNG = np.random.default_rng(5)
WORDS = [f"word{n}" for n in range(5000)]


def keys(documents: list[str], bands: int, rows: int) -> np.ndarray:
    """The keys of each text, [d, bands]."""
    data, offsets = joined([text.encode() for text in documents])
    places = np.arange(len(documents))
    batch = DocumentBatch(data, offsets, places.astype(np.int32), places)
    found = list(find_band_keys([batch], bands, rows, lambda **counts: None))
    assert (found[0][1].reshape(-1, bands) == np.arange(bands)).all()
    return found[0][0].reshape(-1, bands)


def edited(words: list[str], changes: int) -> list[str]:
    """A text with some words at its end replaced."""
    return [*words[: len(words) - changes], *RNG.choice(WORDS, changes)]


def test_pairs_meet_as_often_as_their_jaccard_similarity_says() -> None:
    for changes in (0, 5, 15, 30, 60):
        pairs = []
        for _ in range(150):
            words = RNG.choice(WORDS, 120).tolist()
            pairs.append((words, edited(words, changes)))
        similar = []
        for one, other in pairs:  # by sets of words, with no hash
            a, b = ({tuple(text[k : k + 5]) for k in range(116)} for text in (one, other))
            similar.append(len(a & b) / len(a | b))
        texts = [" ".join(words) for pair in pairs for words in pair]
        found = keys(texts, 14, 8)
        met = (found[::2] == found[1::2]).any(axis=1)
        expected = np.mean([1 - (1 - s**8) ** 14 for s in similar])
        assert abs(met.mean() - expected) < 0.12, (changes, met.mean(), expected)
        assert not (found[2::2] == found[:-2:2]).any()


def test_case_and_punctuation_are_no_difference_and_short_texts_are_told_apart() -> None:
    assert (
        shingles("The quick, brown FOX jumps over!") == shingles("the quick brown fox jumps over")
    ).all()
    short = ["", "a", "b", "a b", "b a", "!", "?", "a b c d e"]
    assert len({int(shingles(text)[0]) for text in short}) == len(short)


@pytest.mark.parametrize("text", ["14", "0x8", "9999x9", "14 x 8"])
def test_other_bands_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not BANDSxROWS"):
        parse_bands(text)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files, of whose 120 texts half are near copies of others."""
    first = [RNG.choice(WORDS, 60).tolist() for _ in range(60)]
    texts = [*first, *(edited(words, k % 3) for k, words in enumerate(first))]
    RNG.shuffle(texts)
    lines = [" ".join(words) for words in texts]
    return [
        write_jsonl(tmp_path / "a.jsonl", lines[:50]),
        write_jsonl(tmp_path / "b.jsonl", lines[50:]),
    ]


class Stopping(InlineRunner):
    """Stops after some tasks."""

    def __init__(self, tasks: int) -> None:
        self.left = tasks

    def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
        for task in tasks:
            if not self.left:
                raise Stop
            self.left -= 1
            super().run(job, [task], total, **callbacks)


def test_what_shares_a_key_with_an_earlier_text_is_dropped_whoever_runs_the_tasks(
    files: list[Path], project: Project
) -> None:
    options: dict[str, Any] = {"dedup": "minhash", "shard_tokens": 400, "id_column": "id"}
    made = project.make(files, "whole", **options)
    assert len(made.manifest.shards) > 4
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    kept, seen = [], set[tuple[int, int]]()
    for row, found in zip(rows, keys([row["text"] for row in rows], 14, 8), strict=True):
        mine = set(enumerate(found.tolist()))
        if not mine & seen:
            kept.append(row["id"])
        seen |= mine
    assert 55 < len(kept) < 75
    dataset = project.open("whole")
    assert [dataset.document(n).id for n in range(dataset.documents)] == kept
    assert made.manifest.dropped == {"near_duplicate": len(rows) - len(kept)}
    assert tokenized(made).minhash == (14, 8)
    assert tokenized(made).libraries[0].startswith("rensa ")
    assert verify(str(project / "whole")).ok
    expected = digests(project / "whole")
    project.make(files, "two", runner=LocalRunner(2), **options)
    assert digests(project / "two") == expected
    tasks = len(made.manifest.shards)
    for stop in (1, 2 * tasks - 1):
        out = project / f"stop-{stop}"
        with pytest.raises(Stop):
            project.make(files, out, runner=Stopping(stop), **options)
        project.make(files, out, **options)
        assert digests(out) == expected
    with pytest.raises(UsageError, match="nothing can be added"):
        add_to(project / "two", files[0])
    # the list of what was dropped does the same again
    listed = project / "whole" / "near-duplicates"
    again = project.make(files, "again", id_column="id", exclude_ids=str(listed))
    assert again.manifest.dropped == {"excluded": len(rows) - len(kept)}
    assert again.manifest.totals == made.manifest.totals
