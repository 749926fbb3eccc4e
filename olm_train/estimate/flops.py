"""Floating-point work of a training step, and what fraction of the device's peak it is.

A token costs 6 FLOPs per parameter of every matrix it is multiplied with (2 forward, 4 backward;
the head counts, the embedding look-up does not), plus attention. Attention counts the query-key
pairs that exist under the causal, per-document mask and no others:

    pairs of a document of n tokens = n (n + 1) / 2 = sum of (position + 1)
    pairs of a layer with a window  = sum of min(position + 1, window)
    FLOPs of a pair = 12 * layers * heads * head_dim        (q.k and p.v, 2 each, times 3)

Where layers differ in their window, pairs are the mean over the layers. Rows that pad the
vocabulary are not work either.

Recomputation is not work in this sense, and an unknown device has no peak: no guess is made.
"""

from __future__ import annotations

import re
from collections import Counter

import torch
from torch import Tensor

from olm_train.model.decoder import DecoderConfig

PEAK_FLOPS = {
    "A10": 125e12,
    "A100": 312e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "GH200": 989e12,
    "GeForce RTX 3090": 71e12,
    "GeForce RTX 3090 Ti": 80e12,
    "GeForce RTX 4080": 97.5e12,
    "GeForce RTX 4090": 165.2e12,
    "GeForce RTX 5080": 112.6e12,
    "GeForce RTX 5090": 209.5e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100 80GB HBM3": 989e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "MI300A": 980.6e12,
    "MI300X": 1307.4e12,
    "MI325X": 1307.4e12,
    "RTX 6000 Ada Generation": 364.2e12,
    "RTX A6000": 154.8e12,
    "RTX PRO 6000 Blackwell Workstation Edition": 503.8e12,
    "RTX PRO 6000 Blackwell Max Q Workstation Edition": 438.9e12,
    "Tesla T4": 8.1e12,
    "Tesla V100": 15.7e12,
    "Tesla V100 PCIE": 14e12,
}
"""Dense FLOP/s by device name, without its vendor prefix: of bf16 products summed in fp32, or of
fp32 where the device has no bf16 (T4, V100).

Sources: the data sheets of NVIDIA and AMD; for GeForce and RTX cards the white papers of GA102, Ada
and RTX Blackwell, row "Peak BF16 Tensor TFLOPS with FP32 Accumulate". Where they give numbers with
sparsity, half of them; where they give those of a system, one device's share (HGX B200 and B300:
36 PFLOP/s of 8; GB200 and GB300 NVL72: 360 PFLOP/s of 72; both with sparsity).
"""

VENDORS = ("NVIDIA ", "AMD Instinct ")
FORM = re.compile(r"SXM\d?|PCIE|DGXS|AC|HBM\w+|\d+GB")
"""What a name may add with the same peak. Anything else is another device, such as a laptop's, or a
part of one (MIG)."""


def device_peak_flops(device_name: str) -> float | None:
    """Dense peak of a device in FLOP/s, see `PEAK_FLOPS`.

    Args:
        device_name: as `torch.cuda.get_device_name()` gives it, e.g. "NVIDIA A100-SXM4-80GB".

    Returns:
        None for a device that is not in the table, or a part of one: then no utilisation can be
        stated.
    """
    for vendor in VENDORS:
        device_name = device_name.removeprefix(vendor)
    words = device_name.replace("-", " ").split()
    for known in sorted(PEAK_FLOPS, key=len, reverse=True):
        length = len(known.split())
        if words[:length] == known.split() and all(map(FORM.fullmatch, words[length:])):
            return PEAK_FLOPS[known]
    return None


def num_flops_per_token(config: DecoderConfig, *, pairs_per_token: float) -> float:
    """FLOPs of forward and backward for one token.

    Args:
        config: shape of the model.
        pairs_per_token: mean number of keys a query sees: `document_pairs` or `attention_pairs`
            of the documents in a batch, divided by its tokens.
    """
    matrices = config.num_matrix_params + config.vocab_size * config.d_model
    attention = 12 * config.n_layers * config.n_heads * config.head_size * pairs_per_token
    return 6 * matrices + attention


def document_pairs(config: DecoderConfig, length: int) -> float:
    """Query-key pairs of a document of `length` tokens, mean over the layers."""
    total = 0
    for window, layers in Counter(config.windows).items():
        seen = length if window is None else min(window, length)
        total += layers * (seen * (seen + 1) // 2 + (length - seen) * seen)
    return total / config.n_layers


def attention_pairs(config: DecoderConfig, positions: Tensor) -> Tensor:
    """Query-key pairs of a micro-batch, mean over the layers, rounded down.

    Args:
        config: shape of the model.
        positions: int [b, S], restarting at 0 at each document.

    Returns:
        int64 scalar on the device of `positions`.
    """
    seen = positions + 1
    total = positions.new_zeros((), dtype=torch.int64)
    for window, layers in Counter(config.windows).items():
        pairs = seen if window is None else seen.clamp(max=window)
        total = total + layers * pairs.sum(dtype=torch.int64)
    return total // config.n_layers


def model_flops_utilisation(
    flops_per_second: float, device_name: str, *, devices: int = 1
) -> float | None:
    """Achieved FLOP/s over the peak of `devices` such devices; None for an unknown one."""
    peak = device_peak_flops(device_name)
    return None if peak is None else flops_per_second / (peak * devices)
