"""Accelerators: their peaks by device name, and those that `--gpu` takes by their short names.

An unknown device has no peak: no guess is made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from olm_data.errors import UsageError, suggest
from olm_train.estimate.device_defaults import Capability

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


HEADROOM = 0.1
"""Share of a device left to the allocator's fragments, collectives and the device's context."""


@dataclass(frozen=True)
class Gpu:
    """A kind of accelerator.

    Attributes:
        name: short name.
        device: its name in `PEAK_FLOPS`.
        memory: bytes it has.
        modern: it has bf16 and runs FlashAttention 2.
    """

    name: str
    device: str
    memory: int
    modern: bool = True

    @property
    def budget(self) -> int:
        """Bytes to plan with: its memory without the headroom."""
        return round(self.memory * (1 - HEADROOM))

    @property
    def capability(self) -> Capability:
        """What a run finds there."""
        return Capability(device="cuda", name=self.name, modern=self.modern, triton=True)

    @property
    def peak_flops(self) -> float:
        """Dense FLOP/s: of bf16, or of fp32 where the device has no bf16."""
        peak = device_peak_flops(self.device)
        assert peak is not None  # each entry below is in the table
        return peak


OLD = ("t4", "v100")
"""Those without bf16."""

GPUS = {
    name: Gpu(name, device, gigabytes * 10**9, modern=name not in OLD)
    for name, device, gigabytes in (
        ("a10", "A10", 24),
        ("a100-40gb", "A100", 40),
        ("a100", "A100", 80),
        ("a30", "A30", 24),
        ("a40", "A40", 48),
        ("b200", "B200", 180),
        ("b300", "B300", 270),
        ("gh200", "GH200", 96),
        ("h100", "H100 80GB HBM3", 80),
        ("h200", "H200", 141),
        ("h200-nvl", "H200 NVL", 141),
        ("l4", "L4", 24),
        ("l40", "L40", 48),
        ("l40s", "L40S", 48),
        ("mi300x", "MI300X", 192),
        ("rtx-3090", "GeForce RTX 3090", 24),
        ("rtx-4080", "GeForce RTX 4080", 16),
        ("rtx-4090", "GeForce RTX 4090", 24),
        ("rtx-5080", "GeForce RTX 5080", 16),
        ("rtx-5090", "GeForce RTX 5090", 32),
        ("rtx-6000-ada", "RTX 6000 Ada Generation", 48),
        ("rtx-a6000", "RTX A6000", 48),
        ("rtx-pro-6000", "RTX PRO 6000 Blackwell Workstation Edition", 96),
        ("t4", "Tesla T4", 16),
        ("v100", "Tesla V100", 32),
    )
}


def gpu_named(name: str) -> Gpu:
    """Return the accelerator called `name`, in any spelling: rtx4090, "RTX 4090", rtx-4090.

    Raises:
        UsageError: it is not in the table.
    """
    plain = {re.sub(r"[^a-z0-9]", "", known): gpu for known, gpu in GPUS.items()}
    asked = re.sub(r"[^a-z0-9]", "", name.lower())
    found = plain.get(asked) or plain.get(f"rtx{asked}")
    if found is None:
        raise UsageError(f"unknown GPU {name!r}", where="--gpu", fix=suggest(name.lower(), GPUS))
    return found
