"""Accelerators by the short names that `--gpu` takes: their entry in the table of peaks, memory.

Source: the data sheets of NVIDIA and AMD, as for the peaks. Never: looks at a device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from olm_data.errors import UsageError, suggest
from olm_train.estimate.device_defaults import Capability
from olm_train.estimate.flops import device_peak_flops

HEADROOM = 0.1
"""Share of a device left to the allocator's fragments, collectives and the device's context."""


@dataclass(frozen=True)
class Gpu:
    """A kind of accelerator.

    Attributes:
        name: short name.
        device: its name in the table of peaks, see `flops.py`.
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
