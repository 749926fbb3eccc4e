"""Accelerators by the short names that `--gpu` takes: their entry in the table of peaks, memory.

Source: NVIDIA's data sheets. Never: looks at a device.
"""

from __future__ import annotations

from dataclasses import dataclass

from olm_data.errors import UsageError, suggest
from olm_train.flops import device_peak_flops

HEADROOM = 0.1
"""Share of a device left to the allocator's fragments, collectives and the device's context."""


@dataclass(frozen=True)
class Gpu:
    """A kind of accelerator.

    Attributes:
        name: short name.
        device: its name in the table of peaks, see `flops.py`.
        memory: bytes it has.
    """

    name: str
    device: str
    memory: int

    @property
    def budget(self) -> int:
        """Bytes to plan with: its memory without the headroom."""
        return round(self.memory * (1 - HEADROOM))

    @property
    def peak_flops(self) -> float:
        """Dense bf16 FLOP/s."""
        peak = device_peak_flops(self.device)
        assert peak is not None  # each entry below is in the table
        return peak


GPUS = {
    name: Gpu(name, device, gigabytes * 10**9)
    for name, device, gigabytes in (
        ("a100-40gb", "A100", 40),
        ("a100", "A100", 80),
        ("b200", "B200", 180),
        ("gh200", "GH200", 96),
        ("h100", "H100 80GB HBM3", 80),
        ("h200", "H200", 141),
        ("l4", "L4", 24),
        ("l40s", "L40S", 48),
    )
}


def gpu_named(name: str) -> Gpu:
    """Return the accelerator called `name`.

    Raises:
        UsageError: it is not in the table.
    """
    if name.lower() not in GPUS:
        raise UsageError(f"unknown GPU {name!r}", where="--gpu", fix=suggest(name.lower(), GPUS))
    return GPUS[name.lower()]
