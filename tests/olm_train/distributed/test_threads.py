"""What of its machine a rank uses: threads, and memory that it keeps."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runs import config_values

from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_train.distributed import threads
from olm_train.distributed.host_memory import USERS, keep_freed_memory
from olm_train.distributed.threads import Processors, cgroup_quota, choose, recorded_threads
from olm_train.run.command import main
from olm_train.run.config import RunConfig
from olm_train.run.dry_run import describe


@pytest.mark.parametrize(
    ("processors", "ranks", "count", "words"),
    [
        (Processors(cores=8), 1, 8, "8 cores"),
        (Processors(cores=8), 4, 2, "8 cores, 4 ranks here"),
        (Processors(cores=2), 8, 1, "2 cores, 8 ranks here"),
        (Processors(cores=96), 8, 12, "96 cores, 8 ranks here"),
        (Processors(cores=8, quota=2.5), 1, 2, "8 cores, a quota of 2.5"),
        (Processors(cores=8, quota=0.5), 1, 1, "8 cores, a quota of 0.5"),
        (Processors(cores=2, load=7.3), 1, 1, "2 cores, load 6.3 of others"),
        (Processors(cores=64, load=33.0), 1, 32, "64 cores, load 32.0 of others"),
        (Processors(cores=64, load=500.0), 2, 8, "64 cores, 2 ranks here, load 498.0 of others"),
        (Processors(cores=1), 1, 1, "1 core"),
    ],
)
def test_t12_threads_are_what_the_machine_leaves(
    processors: Processors, ranks: int, count: int, words: str
) -> None:
    assert processors.threads(ranks) == (count, words)


@given(
    cores=st.integers(1, 256), ranks=st.integers(1, 64), load=st.floats(0, 1000),
    quota=st.none() | st.floats(0.01, 300),
)  # fmt: skip
def test_t12_ranks_never_get_more_threads_than_there_are_cores(
    cores: int, ranks: int, load: float, quota: float | None
) -> None:
    count, _ = Processors(cores=cores, quota=quota, load=load).threads(ranks)
    assert count >= 1
    assert count == 1 or count * ranks <= min(cores, quota or cores) + 1e-6


def test_t12_what_is_given_counts_before_the_environment_and_that_before_the_choice() -> None:
    eight = Processors(cores=8)
    torchrun = {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1", "OMP_NUM_THREADS": "1"}
    assert choose(3, eight, {"OMP_NUM_THREADS": "2"}, 5) == (3, "as configured")
    assert choose(None, eight, {"OMP_NUM_THREADS": "2"}, 5) == (2, "OMP_NUM_THREADS")
    assert choose(None, eight, torchrun, None) == (4, "8 cores, 2 ranks here")  # its own default
    assert choose(None, eight, torchrun | {"OMP_NUM_THREADS": "3"}, None)[0] == 3
    assert choose(None, eight, {}, 5) == (5, "as the run began")
    assert choose(None, eight, {}, 9) == (8, "8 cores")  # from a larger machine
    assert choose(None, Processors(cores=2, load=9), {}, 2) == (2, "as the run began")


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/gone", {}, None),
        ("3:cpu,cpuacct:/x\n2:memory:/y", {"cpu/x/cpu.cfs_quota_us": "200000\n",
            "cpu/x/cpu.cfs_period_us": "100000\n"}, 2.0),
        ("3:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "-1\n",
            "cpu/x/cpu.cfs_period_us": "100000\n"}, None),
    ],
)  # fmt: skip
def test_t12_quotas_of_both_kinds_of_cgroup_are_read(
    cgroup: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    for name, text in {
        "proc/self/cgroup": cgroup + "\n",
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroup_quota(tmp_path) == quota


def test_t12_two_threads_of_a_core_count_once(tmp_path: Path) -> None:
    for number in os.sched_getaffinity(0):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number // 2 * 2}-{number // 2 * 2 + 1}\n")
    expected = len({number // 2 for number in os.sched_getaffinity(0)})
    assert threads._cores(tmp_path) == expected
    assert threads._cores(tmp_path / "nothing") == len(os.sched_getaffinity(0))


def test_t12_a_run_says_records_and_keeps_its_threads(
    tiny_mixture: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    config = tmp_path / "train.yaml"
    config.write_text(json.dumps(config_values(tiny_mixture, tmp_path / "run")))
    quiet = "--trainer.callbacks.lm_evaluator.enabled=false"

    def start(stop: int, *more: str) -> str:
        step = f"--trainer.hard_stop={{value: {stop}, unit: steps}}"
        assert main([str(config), step, quiet, *more]) == 0
        return capsys.readouterr().err

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(Processors, "here", lambda: Processors(cores=3))
    try:
        assert "CPU threads of a rank: 3 (3 cores)" in start(1)
        assert torch.get_num_threads() == 3
        assert recorded_threads(tmp_path / "run" / "config.json") == 3
        monkeypatch.setattr(Processors, "here", lambda: Processors(cores=3, load=9))
        assert "CPU threads of a rank: 3 (as the run began)" in start(2)
        assert "CPU threads of a rank: 2 (as configured)" in start(3, "--threads=2")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    with pytest.raises(UsageError, match="threads is at least 1, not 0"):
        RunConfig.resolve(Values(config_values(tiny_mixture, tmp_path) | {"threads": 0}))
    planned = RunConfig.resolve(Values(config_values(tiny_mixture, tmp_path)))
    assert "CPU threads of a rank, on this machine: 1 (3 cores, load 8.0" in describe(planned, 1)


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
