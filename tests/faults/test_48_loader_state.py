"""Row 48, loader: a state taken after any step leads to exactly the next rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.small_datasets import random_shards, write_mixture

from olm_train.data import DataLoader

S, ROWS = 4, 6


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = {"a": random_shards(0, [[7] * 30, [3] * 20]), "b": random_shards(1, [[50] * 4])}
    return write_mixture(
        tmp_path_factory.mktemp("mixture"),
        sources,
        stages=[(480, {"a": 2, "b": 1})],
        sequence_length=S,
    )


def open_loader(lock: Path, prefetch: int) -> DataLoader:
    return DataLoader(
        lock, global_batch_size=ROWS * S, rank_microbatch_size=2 * S, prefetch=prefetch
    )


@pytest.mark.parametrize("prefetch", [0, 1, 2, 50])
def test_the_state_after_every_step_leads_to_exactly_the_next_rows(
    lock: Path, prefetch: int
) -> None:
    whole = open_loader(lock, prefetch)
    states, rows = [whole.state_dict()], []
    for batches in whole:
        states.append(whole.state_dict())
        rows.append([batch.rows.tolist() for batch in batches])
    assert len(rows) == whole.steps == 20
    for step, state in enumerate(states):
        resumed = open_loader(lock, prefetch)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert [[batch.rows.tolist() for batch in batches] for batches in resumed] == rows[step:]
        assert resumed.state_dict() == states[-1]


@pytest.mark.slow
def test_a_process_killed_while_its_thread_reads_ahead_loses_and_repeats_nothing(
    lock: Path, tmp_path: Path
) -> None:
    state_file = tmp_path / "state.json"
    program = """
import json, os, sys
from olm_train.data import DataLoader
lock, state_file, rows, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
loader = DataLoader(lock, global_batch_size=rows * size, rank_microbatch_size=2 * size, prefetch=9)
if os.path.exists(state_file):
    loader.load_state_dict(json.load(open(state_file)))
for batches in loader:
    state = {"seen": [row for b in batches for row in b.rows.tolist()]} | loader.state_dict()
    with open(state_file + ".new", "w") as file:
        json.dump(state, file)
    os.replace(state_file + ".new", state_file)
    print(json.dumps(state["seen"]), flush=True)
    if loader.step == 7 and len(sys.argv) > 5:
        sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(lock), str(state_file), str(ROWS), str(S)]
    seen: list[int] = []
    with subprocess.Popen(
        [*command, "wait"], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for _ in range(7):
            seen += json.loads(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
    assert json.loads(state_file.read_text())["rows_consumed"] == len(seen) == 7 * ROWS
    done = subprocess.run(command, capture_output=True, check=True)
    seen += [row for line in done.stdout.splitlines() for row in json.loads(line)]
    assert seen == list(range(120))
