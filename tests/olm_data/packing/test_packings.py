"""What every packing promises, whichever there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.order.olmo_core import OlmoCore
from olm_data.order.shuffled import Shuffled
from olm_data.packing.base import PackingCost
from olm_data.packing.concat import Instances
from olm_data.packing.packings import PACKINGS, from_lock

DATASET: Any = SimpleNamespace(digest="0" * 64)


@pytest.mark.parametrize("name", PACKINGS)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=40),
    gap=st.integers(0, 2),
    sequence_length=st.integers(1, 20),
    window=st.integers(1, 9),
)
def test_each_token_is_an_input_once_or_counted_as_dropped(
    name: str, lengths: list[int], gap: int, sequence_length: int, window: int
) -> None:
    sizes = np.array(lengths, np.int64)
    starts = np.cumsum(sizes + gap) - sizes
    windows = (
        (starts[low : low + window], sizes[low : low + window])
        for low in range(0, len(sizes), window)
    )
    cost, rows, inputs = PackingCost(), 0, list[int]()
    of_a_document = {t for a, n in zip(starts, sizes, strict=True) for t in range(a, a + n)}
    for part in PACKINGS[name]().pack(DATASET, windows, sequence_length, cost):
        stops = np.cumsum(part.counts)
        rows += len(part.counts)
        for low, high in zip(stops - part.counts, stops, strict=True):
            row = [
                token
                for start, size in zip(part.starts[low:high], part.lengths[low:high], strict=True)
                for token in range(start, start + size)
            ]
            assert 0 < len(row) <= sequence_length + 1
            assert of_a_document.issuperset(row)
            inputs += row[:sequence_length]
    assert len(set(inputs)) == len(inputs), "an input twice"
    assert (cost.rows, cost.tokens) == (rows, len(inputs))
    assert cost.padding == rows * sequence_length - len(inputs)
    # the last token of a stream may be a label only
    last_label = int(name == "concat" and rows > 0)
    assert cost.dropped == len(of_a_document) - len(inputs) - last_label


def test_a_lock_names_its_packing_and_the_order_of_olmo_core_brings_its_own() -> None:
    for name, packing in PACKINGS.items():
        assert from_lock(name, Shuffled()) == packing()
    order = OlmoCore(batch_rows=4, chunk_rows=2)
    assert from_lock("concat", order) == Instances(chunk_rows=2)
    for wrong in ("best_fit", "unknown", None, 1):
        with pytest.raises(msgspec.ValidationError):
            from_lock(wrong, order)
