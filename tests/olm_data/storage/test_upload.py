"""An upload's parts; `tests/faults` has uploads on real servers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from olm_data.storage.upload import part_size


@given(st.integers(0, 5 << 40))
def test_an_object_of_any_size_has_parts_that_stores_take(size: int) -> None:
    part = part_size(size)
    assert 16 << 20 <= part <= 5 << 30
    assert -(-size // part) <= 9000
