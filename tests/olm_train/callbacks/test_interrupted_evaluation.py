"""A signal or a killed rank in the middle of an evaluation: no rank hangs, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.distributed import run_ranks
from support.eval_requests import make_task
from support.evaluated_ranks import PROMPTS, evaluated, texts
from support.forked import python
from support.ports import free_port
from support.runs import REPOSITORY, environment, metrics

from olm_data.run_log.run_folder import SAMPLES, read_samples
from olm_train.extensions.downstream.tasks import TaskRequests

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "mine"
    rows = TaskRequests(make_task(folder, tiny_tokenizer), 32, 64).rows
    assert rows % 4  # two ranks take two rows at a time: the last batches are not full
    return folder


def left(folder: Path) -> list[Any]:
    """What a run leaves of its steps and evaluations, without times."""
    questions = sorted((folder / "evaluations").rglob("*.json"))
    samples = [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]
    return [
        metrics(folder),
        {str(path.relative_to(folder)): path.read_bytes() for path in questions},
        [{**each, "time": 0} for each in samples],
    ]


@pytest.fixture(scope="module")
def undisturbed(
    task: Path, tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_ranks(evaluated, 2, str(tiny_mixture), str(folder), str(task))[0][0] == "done"
    found = left(folder)
    made = [(line["step"], *line["eval"]) for line in found[0] if "eval" in line]
    assert sorted(made) == [(step, name) for step in (2, 4) for name in ("downstream/mine", "held")]
    assert list(found[1]) == [f"evaluations/downstream/mine/step0000000{n}.json" for n in (2, 4)]
    assert [each["step"] for each in found[2]] == [2, 4]
    return found


@pytest.mark.parametrize("kind", ["held", "task"])
def test_a_signal_to_one_rank_stops_all_and_the_evaluation_is_made_after_the_restart(
    task: Path, tiny_mixture: Path, tmp_path: Path, undisturbed: list[Any], kind: str
) -> None:
    words = (str(tiny_mixture), str(tmp_path), str(task))
    stopped = run_ranks(evaluated, 2, *words, kind, int(signal.SIGTERM))
    assert stopped == [["stopped", 2, 75]] * 2
    made = [name for line in metrics(tmp_path) for name in line.get("eval", {})]
    assert made == (["held"] if kind == "task" else [])
    assert run_ranks(evaluated, 2, *words) == [["done", 4, 0]] * 2
    assert left(tmp_path) == undisturbed


def test_a_rank_that_is_killed_ends_the_other_one_and_nothing_is_lost(
    task: Path, tiny_mixture: Path, tmp_path: Path, undisturbed: list[Any]
) -> None:
    paths = [str(REPOSITORY), str(REPOSITORY / "tests")]
    shared = {
        **environment(), "PYTHONPATH": os.pathsep.join(paths), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    script = str(REPOSITORY / "tests" / "support" / "evaluated_ranks.py")
    words = [str(tiny_mixture), str(tmp_path), str(task)]
    ranks = [
        subprocess.Popen(
            [python(), script, *words, "task"],
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        codes = [rank.wait(timeout=600) for rank in ranks]  # nobody ends the other one
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, -signal.SIGKILL)
    assert run_ranks(evaluated, 2, *words) == [["done", 4, 0]] * 2
    assert left(tmp_path) == undisturbed


@pytest.mark.parametrize(("temperature", "ranks"), [(0.0, (1, 4)), (1.3, (1, 2))])
def test_texts_do_not_depend_on_the_number_of_ranks(
    tiny_mixture: Path, tmp_path: Path, temperature: float, ranks: tuple[int, int]
) -> None:
    found = []
    for count in ranks:
        folder = tmp_path / str(count)
        run_ranks(texts, count, str(tiny_mixture), str(folder), temperature)
        (samples,) = read_samples(folder)
        found.append([(each.prompt, each.text, each.finish) for each in samples.texts])
    assert [prompt for prompt, *_ in found[0]] == PROMPTS
    assert found[0] == found[1]
