"""Where one machine is enough, ranks listen on loopback alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import environment
from support.ports import free_port

RANK = """
import os, sys
from datetime import timedelta
from olm_train.distributed.world import World
world = World.start(timeout=timedelta(seconds=600))
mine = {os.readlink(f"/proc/self/fd/{n}")[8:-1] for n in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{n}") and "socket:[" in os.readlink(f"/proc/self/fd/{n}")}
found = []
for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in open(table).read().splitlines()[1:]:
        parts = line.split()
        if parts[3] == "0A" and parts[9] in mine:
            found.append(parts[1].partition(":")[0])
world.barrier()
print("LISTENS", world.rank, *found)
world.stop()
"""
LOOPBACK = "0100007F"  # 127.0.0.1 as the kernel writes it


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
def test_ranks_of_one_machine_listen_on_loopback_alone() -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    extra = {name: "" for name in os.environ if name.startswith("GLOO_")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={k: v for k, v in environment(extra).items() if v}
            | place
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=600)[0] for rank in ranks]
    for rank, text in enumerate(said):
        words = text.partition("LISTENS ")[2].split()
        assert words[0] == str(rank)
        assert set(words[1:]) == {LOOPBACK}, text
