"""Memory that a step on a CPU gives back is kept for the next one.

glibc returns large blocks to the kernel as soon as they are freed, and each step gets its
activations anew, a page fault and 4 KiB of zeros at a time. Where training computes on the CPU,
freed blocks stay with the process, which then holds what it once needed.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, from malloc.h."""
LARGEST = (1 << 30, 32 << 20)
"""Blocks up to this come from what is kept; some versions of glibc take no more than the second."""
USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Variables by which a user chooses how memory is handed out."""


def keep_freed_memory(device: str, environment: Mapping[str, str]) -> str | None:
    """Have this process keep what it frees, if it computes on the CPU.

    Args:
        device: type of the device that the process trains on.
        environment: that it was started with.

    Returns:
        A line that says so; None where nothing was changed.
    """
    if device != "cpu" or any(environment.get(name) for name in USERS):
        return None
    if platform.libc_ver()[0] != "glibc":
        return None
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    taken = any(mallopt(M_MMAP_THRESHOLD, size) for size in LARGEST)
    if not taken or not mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1):
        return None
    return "freed memory is kept for the next step (glibc)"
