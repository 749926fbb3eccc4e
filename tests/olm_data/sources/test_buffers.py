"""Batches: choosing documents and joining batches loses no record and moves no text."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from olm_data.sources.base import DocumentBatch
from olm_data.sources.buffers import choose, merge

TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6)


def batch_of(documents: list[tuple[int, str]], first: int, skipped: int = 0) -> DocumentBatch:
    """Return (input, text) pairs as a batch; positions and ids count from `first`."""
    texts = [text.encode() for _, text in documents]
    positions = np.arange(first, first + len(texts), dtype=np.int64)
    return DocumentBatch(
        data=np.frombuffer(b"".join(texts), np.uint8),
        offsets=np.cumsum([0, *map(len, texts)]).astype(np.int64),
        inputs=np.array([input for input, _ in documents], np.int32),
        positions=positions,
        ids=pa.array(map(str, positions), pa.string()),
        rows_in=len(texts) + skipped,
        skipped={(0, "filtered"): skipped} if skipped else {},
    )


@given(st.lists(st.tuples(st.integers(0, 2), TEXT, st.booleans()), max_size=12))
def test_choosing_keeps_what_is_chosen_and_counts_the_rest_by_input(
    documents: list[tuple[int, str, bool]],
) -> None:
    batch = batch_of([(input, text) for input, text, _ in documents], 5, skipped=2)
    kept = choose(batch, np.array([taken for *_, taken in documents], bool), "unsampled")
    expected = [(k, text) for k, (_, text, taken) in enumerate(documents, 5) if taken]
    assert [kept.text(k) for k in range(kept.documents)] == [text for _, text in expected]
    assert kept.positions.tolist() == [k for k, _ in expected]
    assert kept.ids.to_pylist() == [str(k) for k, _ in expected]
    lost = sorted(input for input, _, taken in documents if not taken)
    assert dict(kept.skipped) == {(0, "filtered"): 2} | {
        (input, "unsampled"): len(list(group)) for input, group in groupby(lost)
    }
    assert kept.rows_in == kept.documents + sum(kept.skipped.values())


@given(st.lists(st.tuples(st.lists(TEXT, max_size=4), st.integers(0, 3)), max_size=40))
def test_merging_keeps_every_document_and_every_count(parts: list[tuple[list[str], int]]) -> None:
    first, batches = 0, []
    for texts, skipped in parts:
        batches.append(batch_of([(0, text) for text in texts], first, skipped))
        first += len(texts)
    merged = list(merge(batches, 16))
    texts = [batch.text(k) for batch in merged for k in range(batch.documents)]
    assert texts == [text for part, _ in parts for text in part]
    assert sum(batch.rows_in for batch in merged) == sum(batch.rows_in for batch in batches)
    assert sum(sum(batch.skipped.values()) for batch in merged) == sum(n for _, n in parts)
