"""Training on a CPU keeps freed memory, unless the user or the device says otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from olm_train.distributed.host_memory import USERS, keep_freed_memory

GLIBC = platform.libc_ver()[0] == "glibc"
FAULTS = """
import os, resource, sys
from olm_train.distributed.host_memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

said = keep_freed_memory(sys.argv[1], os.environ)
def step():
    blocks = [b"a" * (4 << 20) for _ in range(16)]

step(), step()
before = faults()
step(), step()
print(said is not None, faults() - before)
"""


def faults_of(device: str, **variables: str) -> tuple[bool, int]:
    """Whether memory is kept, and the page faults of two steps that make 64 MiB and free them."""
    clean = {name: value for name, value in os.environ.items() if name not in USERS}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, device],
        env=clean | variables, capture_output=True, text=True, timeout=1200, check=True,
    )  # fmt: skip
    kept, count = done.stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(not GLIBC, reason="another C library: nothing is changed")
def test_blocks_freed_are_used_again_without_a_page_fault() -> None:
    pages = 2 * 16 * (4 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults_of("cuda") == (False, pytest.approx(pages, rel=0.1))
    kept, faults = faults_of("cpu")
    assert kept
    assert faults < pages / 10


@pytest.mark.parametrize("name", USERS)
def test_what_the_user_set_stands(name: str) -> None:
    assert keep_freed_memory("cpu", {name: "65536"}) is None
