"""Accelerators: their peaks by device name, and those that `--gpu` takes by their short names.

An unknown device has no peak: no guess is made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from olm_data.errors import UsageError, suggest
from olm_train.estimate.device_defaults import Capability

DEVICES: dict[str, tuple[float, dict[str, int]]] = {
    "A10": (125e12, {"a10": 24}),
    "A100": (312e12, {"a100-40gb": 40, "a100": 80}),
    "A30": (165e12, {"a30": 24}),
    "A40": (149.7e12, {"a40": 48}),
    "B200": (2250e12, {"b200": 180}),
    "B300": (2250e12, {"b300": 270}),
    "GB200": (2500e12, {}),
    "GB300": (2500e12, {}),
    "GH200": (989e12, {"gh200": 96}),
    "H100 80GB HBM3": (989e12, {"h100": 80}),
    "H100 NVL": (835e12, {}),
    "H100 PCIe": (756e12, {}),
    "H200": (989e12, {"h200": 141}),
    "H200 NVL": (835e12, {"h200-nvl": 141}),
    "L4": (121e12, {"l4": 24}),
    "L40": (181e12, {"l40": 48}),
    "L40S": (362e12, {"l40s": 48}),
    "MI300A": (980.6e12, {}),
    "MI300X": (1307.4e12, {"mi300x": 192}),
    "MI325X": (1307.4e12, {}),
    "GeForce RTX 3090": (71e12, {"rtx-3090": 24}),
    "GeForce RTX 3090 Ti": (80e12, {}),
    "GeForce RTX 4080": (97.5e12, {"rtx-4080": 16}),
    "GeForce RTX 4090": (165.2e12, {"rtx-4090": 24}),
    "GeForce RTX 5080": (112.6e12, {"rtx-5080": 16}),
    "GeForce RTX 5090": (209.5e12, {"rtx-5090": 32}),
    "RTX 6000 Ada Generation": (364.2e12, {"rtx-6000-ada": 48}),
    "RTX A6000": (154.8e12, {"rtx-a6000": 48}),
    "RTX PRO 6000 Blackwell Workstation Edition": (503.8e12, {"rtx-pro-6000": 96}),
    "RTX PRO 6000 Blackwell Max Q Workstation Edition": (438.9e12, {}),
    "Tesla T4": (8.1e12, {"t4": 16}),
    "Tesla V100": (15.7e12, {"v100": 32}),
    "Tesla V100 PCIE": (14e12, {}),
}
"""Devices by name, without its vendor prefix: dense FLOP/s, of bf16 products summed in fp32, or of
fp32 where the device has no bf16 (T4, V100); and gigabytes of memory by the short names of those
that `--gpu` takes.

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
    """Dense peak of a device in FLOP/s, see `DEVICES`.

    Args:
        device_name: as `torch.cuda.get_device_name()` gives it, e.g. "NVIDIA A100-SXM4-80GB".

    Returns:
        None for a device that is not in the table, or a part of one: then no utilisation can be
        stated.
    """
    for vendor in VENDORS:
        device_name = device_name.removeprefix(vendor)
    words = device_name.replace("-", " ").split()
    for known in sorted(DEVICES, key=len, reverse=True):
        length = len(known.split())
        if words[:length] == known.split() and all(map(FORM.fullmatch, words[length:])):
            return DEVICES[known][0]
    return None


HEADROOM = 0.1
"""Share of a device left to the allocator's fragments, collectives and the device's context."""


@dataclass(frozen=True)
class Gpu:
    """A kind of accelerator.

    Attributes:
        name: short name.
        peak_flops: dense FLOP/s: of bf16, or of fp32 where the device has no bf16.
        memory: bytes it has.
        modern: it has bf16 and runs FlashAttention 2.
    """

    name: str
    peak_flops: float
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


OLD = ("t4", "v100")
"""Those without bf16."""

GPUS = {
    name: Gpu(name, peak, gigabytes * 10**9, modern=name not in OLD)
    for peak, sizes in DEVICES.values()
    for name, gigabytes in sizes.items()
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
