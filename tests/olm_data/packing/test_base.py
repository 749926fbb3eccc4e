"""What packings share: the pieces of cut documents come a part at a time."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from support.packing import documents, peak, rows_of

from olm_data.packing import base
from olm_data.packing.base import PackedRows, PackingCost
from olm_data.packing.packings import PACKINGS

DATASET: Any = SimpleNamespace(digest="0" * 64)


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_rows_of_long_documents_are_made_a_part_at_a_time(
    packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = documents([1 << 18] * 3)  # 49,152 rows

    def packed() -> Iterable[PackedRows]:
        return PACKINGS[packing]().pack(DATASET, [window], 16, PackingCost())

    whole = rows_of(packed())
    monkeypatch.setattr(base, "PART", 1 << 10)
    assert rows_of(packed()) == whole
    assert peak(packed()) < 1 << 18
