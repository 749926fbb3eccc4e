"""The numbers that are promised hold on processors with fewer instructions than this one.

A process takes its instructions once, when it starts: `ATEN_CPU_CAPABILITY` is torch's own part,
`ONEDNN_MAX_CPU_ISA` that of oneDNN, `MKL_ENABLE_INSTRUCTIONS` that of MKL. A set that this
processor lacks stands for all that it has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SETS = {
    "baseline": ("default", "SSE41", "SSE4_2", 1),
    "avx2": ("avx2", "AVX2", "AVX2", 2),
    "avx512": ("avx512", "AVX512_CORE", "AVX512", 1),
    "all": ("", "ALL", "", 2),  # also instructions for bfloat16
}
"""Their names for torch, oneDNN and MKL; threads."""
KERNELS = ("default", "avx2", "avx512")
"""Of torch, each with the instructions of those before it."""
PROMISES = (
    "extensions/averaging/test_model_merge.py::"
    "test_merges_at_steps_and_intervals_with_windows_that_overlap",  # within a rounding
    "extensions/averaging/test_merge.py::test_the_mean_is_that_of_float64_rounded_once",
    "model/test_attention.py",
    "model/test_loss.py",
    "model/test_layers.py",
    "model/test_init.py",  # drawn weights: the same bits everywhere
    "test_train_module.py::test_resume_is_bit_identical",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_bounds_and_resumes_to_the_bit_hold_with_the_instructions(
    repository: Path, name: str
) -> None:
    aten, onednn, mkl, threads = SETS[name]
    has = torch.backends.cpu.get_cpu_capability().lower()
    if aten and (has not in KERNELS or KERNELS.index(aten) > KERNELS.index(has)):
        pytest.skip(f"this CPU ({has}) ends a process that takes kernels for {aten}")
    names = {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
    names |= {"MKL_ENABLE_INSTRUCTIONS": mkl, "OMP_NUM_THREADS": str(threads)}
    environment = os.environ | {key: value for key, value in names.items() if value}
    tests = [f"tests/olm_train/{each}" for each in PROMISES]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow"]
    done = subprocess.run(
        [*command, *tests], cwd=repository, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout or "[100%]" in done.stdout
