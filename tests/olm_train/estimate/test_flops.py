"""FLOPs: the formula counts what the model multiplies, and no device's peak is guessed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batches import make_batch
from support.model_options import CONFIG, OPTIONS
from torch.utils.flop_counter import FlopCounterMode

from olm_train.estimate.flops import attention_pairs, document_pairs, num_flops_per_token
from olm_train.estimate.gpus import device_peak_flops, model_flops_utilisation
from olm_train.model.attention import block_causal_mask
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.model.presets import preset


@pytest.mark.parametrize("change", OPTIONS, ids=str)
def test_matrix_work_equals_torchs_own_count(change: dict[str, Any]) -> None:
    config = replace(CONFIG, **{**change, "vocab_multiple": 1})
    model = Decoder(config)
    init_parameters(model, 0)
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
    config = replace(CONFIG, n_layers=5, sliding_window=tuple(pattern))
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
    config = preset("olm-125m", vocab_size=50_304, tie_embeddings=True)
    assert 0.78e9 < num_flops_per_token(config, pairs_per_token=1025 / 2) < 0.82e9


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L20", None),
        ("NVIDIA H100", None),
        ("NVIDIA H20", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_peaks_are_known_or_none(name: str, peak: float | None) -> None:
    assert device_peak_flops(name) == peak
    assert model_flops_utilisation(1e12, name, devices=2) == (peak and 1e12 / (2 * peak))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA GB300", 2500e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("AMD Instinct MI300A", 980.6e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("AMD Instinct MI250X", None),
    ],
)
def test_t11_a_peak_is_stated_for_whole_known_devices_alone(name: str, peak: float | None) -> None:
    assert device_peak_flops(name) == peak
    assert (model_flops_utilisation(1e12, name) is None) is (peak is None)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4080 SUPER", None),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA GeForce RTX 3090 Ti", 80e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12),
        ("NVIDIA RTX 6000 Ada Generation", 364.2e12),
        ("NVIDIA RTX A6000", 154.8e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8e12),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9e12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA A40-48Q", None),
        ("Tesla T4", 8.1e12),
        ("Tesla V100-SXM2-32GB", 15.7e12),
        ("Tesla V100-PCIE-16GB", 14e12),
    ],
)
def test_u12_cards_of_desktops_and_workstations_have_a_peak_and_their_variants_none(
    name: str, peak: float | None
) -> None:
    assert device_peak_flops(name) == peak
