"""What the dry run says that a rank sends is what it sends."""

from __future__ import annotations

import pytest
from support.distributed import run_ranks
from support.traffic_ranks import LAYOUTS, sent


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[int, int]]:
    ranks = run_ranks(sent, 4)
    return {name: max(rank[name] for rank in ranks) for name in LAYOUTS}


@pytest.mark.slow
@pytest.mark.xdist_group("parallel")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_sends_what_was_foreseen(layout: str, found: dict[str, tuple[int, int]]) -> None:
    counted, foreseen = found[layout]
    # where a token's experts are is the router's choice
    assert foreseen == pytest.approx(counted, rel=0.1 if layout == "experts" else 0.01)
