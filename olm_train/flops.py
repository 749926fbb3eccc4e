"""Floating-point work of a training step, and what fraction of the device's peak it is.

A token costs 6 FLOPs per parameter of every matrix it is multiplied with (2 forward, 4 backward;
the head counts, the embedding look-up does not), plus attention. Attention counts the query-key
pairs that exist under the causal, per-document mask and no others:

    pairs of a document of n tokens = n (n + 1) / 2 = sum of (position + 1)
    FLOPs of a pair = 12 * layers * heads * head_dim        (q.k and p.v, 2 each, times 3)

Recomputation is not work in this sense, and an unknown device has no peak: no guess is made.
"""

from __future__ import annotations

from olm_train.model.decoder import DecoderConfig

PEAK_BF16_FLOPS = {
    "A100": 312e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100 80GB HBM3": 989e12,
    "H200": 989e12,
    "L4": 121e12,
    "L40S": 362e12,
}
"""Dense bf16 FLOP/s by device name, without its vendor prefix. Source: NVIDIA's data sheets."""


def device_peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of a device in FLOP/s.

    Args:
        device_name: as `torch.cuda.get_device_name()` gives it, e.g. "NVIDIA A100-SXM4-80GB".

    Returns:
        None for a device that is not in the table: then no utilisation can be stated.
    """
    words = device_name.removeprefix("NVIDIA ").replace("-", " ").split()
    best = None
    for known in sorted(PEAK_BF16_FLOPS, key=len):
        if words[: len(known.split())] == known.split():
            best = PEAK_BF16_FLOPS[known]
    return best


def num_flops_per_token(config: DecoderConfig, *, pairs_per_token: float) -> float:
    """FLOPs of forward and backward for one token.

    Args:
        config: shape of the model.
        pairs_per_token: mean number of keys a query sees: the sum of n (n + 1) / 2 over the
            documents in a batch, divided by its tokens. (S + 1) / 2 for rows of one document.
    """
    vectors = (2 * config.n_layers + 1) * config.d_model
    if config.qk_norm:
        vectors += 2 * config.n_layers * config.head_size
    matrices = config.num_non_embedding_params - vectors + config.vocab_size * config.d_model
    attention = 12 * config.n_layers * config.n_heads * config.head_size * pairs_per_token
    return 6 * matrices + attention


def model_flops_utilisation(
    flops_per_second: float, device_name: str, *, devices: int = 1
) -> float | None:
    """Achieved FLOP/s over the peak of `devices` such devices; None for an unknown one."""
    peak = device_peak_flops(device_name)
    return None if peak is None else flops_per_second / (peak * devices)
