"""Work of a step, and what a rank sends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batches import make_batch
from support.distributed import run_ranks
from support.model_options import CONFIG, OPTIONS, drawn
from support.traffic_ranks import LAYOUTS, sent
from torch.utils.flop_counter import FlopCounterMode

from olm_train.estimate.flops import attention_pairs, document_pairs, num_flops_per_token
from olm_train.model.attention_dense import block_causal_mask
from olm_train.model.config import DecoderConfig
from olm_train.model.presets import preset


@pytest.mark.parametrize("change", OPTIONS, ids=str)
def test_matrix_work_equals_torchs_own_count(change: dict[str, Any]) -> None:
    config = CONFIG.changed(**{**change, "vocab_multiple": 1})
    model = drawn(config)
    batch = make_batch([[64]], vocab_size=50)
    with FlopCounterMode(display=False) as counter:
        model(batch.input_ids, doc_start=batch.doc_start).sum().backward()
    products = {
        str(name): count
        for name, count in counter.get_flop_counts()["Global"].items()
        if str(name) in ("aten.mm", "aten.addmm")
    }
    # No gradient is taken with respect to ids, so all of forward, dx and dw is there.
    assert sum(products.values()) == 64 * num_flops_per_token(config, pairs_per_token=0)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.lists(st.integers(1, 12) | st.just(-1), min_size=1, max_size=4),
)
def test_pairs_are_those_that_the_windows_leave(lengths: list[int], pattern: list[int]) -> None:
    config = CONFIG.changed(n_layers=5, attention={"sliding_window": tuple(pattern)})
    batch = make_batch([lengths], vocab_size=2)
    masks = [block_causal_mask(batch.doc_start, window) for window in config.windows]
    seen = sum(int(mask.sum()) for mask in masks)
    assert attention_pairs(config, batch.positions) == seen // 5
    assert sum(document_pairs(config, n) for n in lengths) == pytest.approx(seen / 5)


def test_attention_counts_the_pairs_that_exist() -> None:
    config = DecoderConfig(vocab_size=100, d_model=32, n_layers=3, n_heads=4, head_dim=16)
    pairs = 10 * 11 / 2 + 6 * 7 / 2
    extra = num_flops_per_token(config, pairs_per_token=pairs / 16) - num_flops_per_token(
        config, pairs_per_token=0
    )
    forward_of_a_pair = 2 * 2 * 16  # q.k and p.v, multiply and add, over head_dim
    assert extra * 16 == 3 * forward_of_a_pair * 3 * 4 * pairs


def test_a_known_model_costs_what_is_published() -> None:
    # About 0.80 GFLOP a token for the 125M shape at 1,024 tokens and a vocabulary of 50,304.
    config = preset("olm-125m", vocab_size=50_304, head={"tied": True})
    assert 0.78e9 < num_flops_per_token(config, pairs_per_token=1025 / 2) < 0.82e9


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
