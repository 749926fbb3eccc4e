"""Rows cut into parts are those that the loader gives; truncated ones are the beginnings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs import STEPS

from olm_data.rows.reader import RowReader
from olm_train.callbacks.sequence_length_scheduler import split_rows, truncate_rows
from olm_train.data.batch import Batch

ROWS = np.arange(2 * STEPS, dtype=np.int64)
NAMES = ("input_ids", "labels", "doc_start", "positions", "rows")


def ends(batch: Batch) -> list[int]:
    return sorted(set(batch.cu_seqlens.tolist()))


@pytest.mark.parametrize("parts", [1, 2, 4, 32])
def test_rows_cut_into_parts_are_those_of_a_stage_of_that_length(
    tiny_mixture: Path, parts: int
) -> None:
    windows = RowReader(tiny_mixture).prepare(ROWS)
    whole = Batch.from_rows(windows.read(0, len(ROWS)))
    wanted = Batch.from_rows(windows.read(0, len(ROWS), parts))
    found = split_rows(whole, 32 // parts)
    for name in NAMES:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
        assert getattr(found, name).dtype == getattr(wanted, name).dtype
    assert found.max_seqlen == wanted.max_seqlen == 32 // parts
    assert ends(found) == ends(wanted)
    offsets = found.cu_seqlens.tolist()
    assert offsets == sorted(offsets)
    assert found.cu_seqlens.dtype == wanted.cu_seqlens.dtype
    assert len(set(offsets)) == int(np.searchsorted(offsets, offsets[-1])) + 1  # padded at the end


@pytest.mark.parametrize("length", [1, 7, 31, 32])
def test_truncated_rows_are_the_beginnings_of_rows(tiny_mixture: Path, length: int) -> None:
    whole = Batch.from_rows(RowReader(tiny_mixture).prepare(ROWS).read(0, len(ROWS)))
    found = truncate_rows(whole, length)
    for name in NAMES[:-1]:
        assert torch.equal(getattr(found, name), getattr(whole, name)[:, :length]), name
    assert torch.equal(found.rows, whole.rows)
    assert found.max_seqlen == length
    # A piece begins where positions do.
    begins = (found.positions.flatten() == 0).nonzero().flatten().tolist()
    assert ends(found) == [*begins, len(ROWS) * length]
