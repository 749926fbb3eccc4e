"""Row plans: every token of every chosen document, in rows that never mix up where it came from."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import ValidationError
from olm_data.mixture.packing import row_span, rows_in
from olm_data.mixture.row_plan import (
    PackedRows,
    RowPlan,
    StreamPacker,
    Waste,
    pack_best_fit,
    pack_documents,
    write,
)
from olm_data.storage.store import Store

LENGTHS = st.lists(st.integers(1, 40), max_size=40)
Row = list[tuple[int, int]]


def documents(lengths: list[int], gap: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of documents with `gap` tokens of others between them."""
    sizes = np.array(lengths, np.int64)
    return np.cumsum(sizes + gap) - sizes, sizes


def rows_of(packed: PackedRows) -> list[Row]:
    pieces = list(zip(packed.starts.tolist(), packed.lengths.tolist(), strict=True))
    stops = np.cumsum(packed.counts)
    return [pieces[b - n : b] for b, n in zip(stops.tolist(), packed.counts.tolist(), strict=True)]


def inputs(row: Row, sequence_length: int) -> list[int]:
    """The places of the dataset whose tokens are inputs of a row."""
    return [t for start, size in row for t in range(start, start + size)][:sequence_length]


@given(LENGTHS, st.integers(1, 20), st.integers(0, 3))
def test_best_fit_rows_hold_every_token_once_and_name_the_one_that_follows(
    lengths: list[int], sequence_length: int, gap: int
) -> None:
    starts, sizes = documents(lengths, gap)
    waste = Waste()
    packed = pack_best_fit(starts, sizes, sequence_length, key=7, min_tail=1, waste=waste)
    rows = rows_of(packed)
    seen = [t for row in rows for t in inputs(row, sequence_length)]
    places = [t for a, n in zip(starts.tolist(), lengths, strict=True) for t in range(a, a + n)]
    assert sorted(seen) == places
    ends = set((starts + sizes).tolist())
    for row in rows:
        total = sum(size for _, size in row)
        assert total <= sequence_length + 1
        if total == sequence_length + 1:  # one document that goes on
            assert len(row) == 1
            assert row[0][0] + sequence_length not in ends
        else:
            assert all(start + size in ends for start, size in row)
    assert (waste.rows, waste.tokens, waste.dropped) == (len(rows), len(places), 0)
    assert waste.padding == len(rows) * sequence_length - len(places)
    assert waste.cut_long == sum(n > sequence_length for n in lengths)
    assert waste.cut_short == 0


@given(LENGTHS, st.integers(1, 20))
def test_a_document_row_holds_one_document(lengths: list[int], sequence_length: int) -> None:
    starts, sizes = documents(lengths)
    rows = rows_of(pack_documents(starts, sizes, sequence_length, waste=Waste()))
    assert all(len(row) == 1 for row in rows)
    assert [t for row in rows for t in inputs(row, sequence_length)] == list(range(sum(lengths)))
    assert len(rows) == sum(-(-n // sequence_length) for n in lengths)


@given(LENGTHS, st.integers(1, 20), st.lists(st.integers(0, 40), max_size=4), st.integers(0, 3))
def test_a_stream_has_the_same_rows_in_any_windows(
    lengths: list[int], sequence_length: int, cuts: list[int], gap: int
) -> None:
    starts, sizes = documents(lengths, gap)
    waste = Waste()
    packer, rows = StreamPacker(sequence_length, waste), []
    edges = [0, *sorted(min(cut, len(lengths)) for cut in cuts), len(lengths)]
    for a, b in itertools.pairwise(edges):
        rows += rows_of(packer.pack(starts[a:b], sizes[a:b]))
    stream = [t for a, n in zip(starts.tolist(), lengths, strict=True) for t in range(a, a + n)]
    wanted = [
        stream[slice(*row_span(r, sequence_length))]
        for r in range(rows_in(len(stream), sequence_length))
    ]
    assert [[t for start, size in row for t in range(start, start + size)] for row in rows] == (
        wanted
    )
    owner = {t: d for d, (a, n) in enumerate(zip(starts.tolist(), lengths, strict=True))
             for t in range(a, a + n)}  # fmt: skip
    for row in rows:  # pieces end where documents end, but for the last of the row
        for (start, size), (following, _) in itertools.pairwise(row):
            assert owner[start + size - 1] != owner[following]
    # cut: the document of a row's last input goes on as the next row's first
    apart = {owner[one[-1]] for one in wanted if owner[one[-2]] == owner[one[-1]]}
    assert waste.cut_long + waste.cut_short == len(apart)
    assert waste.cut_long == sum(lengths[d] > sequence_length for d in apart)


def test_a_stored_plan_is_the_plan(tmp_path: Path) -> None:
    starts, sizes = documents([5, 3, 9, 20, 1, 2])
    parts = [
        pack_best_fit(starts[a:b], sizes[a:b], 8, key=1, min_tail=1, waste=Waste())
        for a, b in ((0, 3), (3, 6))
    ]
    rows, pieces = write(tmp_path, parts)
    plan = RowPlan.open(Store(tmp_path), rows, pieces)
    assert [plan.pieces(r) for r in range(plan.rows)] == [r for p in parts for r in rows_of(p)]
    for name in ("starts.npy", "lengths.npy", "ends.npy"):
        data = (tmp_path / name).read_bytes()
        for broken in (data[:-1], data[:100], b""):
            (tmp_path / name).write_bytes(broken)
            with pytest.raises(ValidationError, match="missing or damaged"):
                RowPlan.open(Store(tmp_path), rows, pieces)
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValidationError, match=r"not uint64 \[1\]"):
        RowPlan.open(Store(tmp_path), 1, pieces)
