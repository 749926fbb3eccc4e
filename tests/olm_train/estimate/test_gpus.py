"""Accelerators by name: their peaks, and the names that people write."""

from __future__ import annotations

import pytest

from olm_train.estimate.gpus import GPUS, device_peak_flops, gpu_named


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
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA GB300", 2500e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("AMD Instinct MI300A", 980.6e12),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("AMD Instinct MI250X", None),
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
def test_a_peak_is_stated_for_whole_known_devices_alone(name: str, peak: float | None) -> None:
    assert device_peak_flops(name) == peak


@pytest.mark.parametrize("name", ["rtx-4090", "RTX 4090", "4090", "L4", "rtx6000ada", "t4"])
def test_a_gpu_is_known_by_the_names_that_people_write(name: str) -> None:
    assert gpu_named(name) in GPUS.values()
    assert gpu_named(name).peak_flops > 0


def test_every_gpu_has_an_entry_in_the_table_of_peaks() -> None:
    assert all(gpu.peak_flops > 1e12 and gpu.memory >= 16e9 for gpu in GPUS.values())
