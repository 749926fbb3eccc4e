"""Row 61: a rank that hangs ends every rank in bounded time, with stacks and last steps."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.forked import python
from support.ports import free_port
from support.runs import REPOSITORY, environment


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--train_module.cp_config={degree: 2}"],
        [
            "--train_module.ep_config={degree: 2}",
            "--model.feed_forward={name: moe, n_experts: 4, top_k: 2, hidden_size: 16}",
        ],
    ],
)
def test_61_all_ranks_end_and_say_where_each_was(
    tiny_mixture: Path, tmp_path: Path, options: list[str]
) -> None:
    port = str(free_port())
    script = REPOSITORY / "tests" / "support" / "hung_rank.py"
    ranks = [
        subprocess.Popen(
            [python(), str(script), str(tiny_mixture), str(tmp_path), *options],
            env={
                **environment(),
                "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")]),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert all(rank.returncode for rank in ranks)
    assert "wait_for_ever" in told[1]  # the stack of the one that hangs
    report = next(text for text in told if "has not moved for 20 seconds" in text)
    assert "rank 1: step 2 done, in the step after it" in report
    assert "rank 0: step " in report
