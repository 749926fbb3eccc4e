"""lm_eval on a checkpoint: its scores are ours, and those of its own models of the same weights."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.command import environment
from support.eval_requests import one_by_one
from support.harness_tasks import questions, texts, write_tasks
from support.hf_twin import POSITIONS, save_both

from olm_data.dataset.eval_set import EvalSet
from olm_data.extensions.eval_sets.tasks import build, read_jsonl
from olm_data.tokenizer.tokenizer import load_tokenizer
from olm_train.extensions.downstream.command import main as evaluate
from olm_train.extensions.generate.loaded import LoadedModel
from olm_train.extensions.generate.template import ChatTemplate
from olm_train.extensions.serve.command import ModelServer
from olm_train.extensions.serve.worker import Worker

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("harness")]
TASKS = ["animals", "texts", "goon"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """`ours`, `theirs`, tasks and the eval set of one of them."""
    folder = tmp_path_factory.mktemp("harness")
    save_both(folder, tiny_tokenizer)
    task = read_jsonl(write_tasks(folder / "tasks"))
    build(task, load_tokenizer(tiny_tokenizer), str(folder / "set"))
    return folder


@pytest.fixture(scope="module")
def ours(place: Path) -> dict[str, Any]:
    """What `olm-train lm-eval` writes, without a network: results and samples by task."""
    words = ["--model", "olm", "--tasks", ",".join(TASKS), "--include_path", "tasks"]
    words += ["--model_args", f"checkpoint=ours,max_length={POSITIONS}", "--batch_size", "auto"]
    words += ["--output_path", "out", "--log_samples"]
    done = subprocess.run(
        [sys.executable, "-m", "olm_train.cli", "lm-eval", *words],
        cwd=place,
        env=environment() | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "home")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "requests are longer than the 64 tokens that the model looks at" in done.stderr
    (result,) = (place / "out").glob("*/results_*.json")
    found: dict[str, Any] = json.loads(result.read_text())
    found["samples"] = {}
    for name in TASKS:
        (file,) = (place / "out").glob(f"*/samples_{name}_*.jsonl")
        lines = map(json.loads, file.read_text().splitlines())
        found["samples"][name] = sorted(lines, key=lambda line: line["doc_id"])
    return found


def by_lm_eval(
    place: Path, kind: str, tasks: Sequence[str] = TASKS, **arguments: Any
) -> dict[str, Any]:
    """Tasks by another of lm_eval's models."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(place / "tasks"), include_defaults=False)
    found: dict[str, Any] = simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=list(tasks),
        device="cpu",
        task_manager=manager,
        bootstrap_iters=0,
    )
    return found


def answers(found: dict[str, Any], task: str) -> list[list[Any]]:
    """What the model answered each request of each question, numbers as such."""
    samples = sorted(found["samples"][task], key=lambda each: each["doc_id"])
    return [list(_flat(each["resps"], texts=task == "goon")) for each in samples]


def _flat(value: Any, *, texts: bool) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _flat(inner, texts=texts)
    else:  # lm_eval writes numbers as text
        yield value if texts else float({"True": 1, "False": 0}.get(str(value), value))


def same(first: dict[str, Any], second: dict[str, Any], tasks: Sequence[str] = TASKS) -> None:
    """Request by request: log p to 1e-4 of itself, greedy or not, and texts letter by letter."""
    for task in tasks:
        pairs = zip(answers(first, task), answers(second, task), strict=True)
        for a, b in pairs:
            assert a == (b if task == "goon" else pytest.approx(b, rel=1e-4))
        for name, value in first["results"][task].items():
            if isinstance(value, float) and "stderr" not in name:
                assert second["results"][task][name] == pytest.approx(value, rel=1e-4), name


def test_its_scores_are_those_of_olm_train_evaluate(place: Path, ours: dict[str, Any]) -> None:
    words = [str(place / "ours"), "--sequence-length", str(POSITIONS), "--json"]
    done = CliRunner().invoke(evaluate, [*words, "--data", str(place / "set")])
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["datasets"].values()
    theirs = ours["results"]["animals"]
    assert found["acc"] == theirs["acc,none"]
    assert found["len_norm"] == theirs["acc_norm,none"]
    assert found["acc_uncond"] == theirs["acc_mutual_info,none"]
    requests = EvalSet.open(str(place / "set")).requests
    model = LoadedModel.open(str(place / "ours"), "latest", print, device=torch.device("cpu")).model
    log_p = one_by_one(model, place / "set", POSITIONS)
    for number, line in enumerate(ours["samples"]["animals"]):
        mine = requests.question == number
        expected = [*log_p[mine & ~requests.unconditional], *log_p[mine & requests.unconditional]]
        said = list(_flat(line["resps"], texts=False))[::2]
        assert said == pytest.approx(expected, rel=1e-5)
    assert ours["config"]["requests_truncated"] > 0
    assert ours["config"]["model_dtype"] == "float32"


def test_its_scores_and_texts_are_those_of_transformers(place: Path, ours: dict[str, Any]) -> None:
    hf = by_lm_eval(
        place, "hf", pretrained=str(place / "theirs"), dtype="float32", max_length=POSITIONS
    )
    same(ours, hf)
    assert len(answers(ours, "animals")) == len(questions())
    assert any(text for (text,) in answers(ours, "goon"))


@contextlib.contextmanager
def serving(model: Path) -> Iterator[str]:
    loaded = LoadedModel.open(str(model), "latest", print, device=torch.device("cpu"))
    with (
        Worker(loaded.engine(8)) as worker,
        ModelServer(loaded, ChatTemplate(), worker, "tiny", 0) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def test_its_scores_and_texts_are_those_of_the_server(place: Path, ours: dict[str, Any]) -> None:
    with serving(place / "ours") as url:
        # It keeps a token of its length for an answer; of scores it counts the last label too.
        for tasks, more in ((["animals", "texts"], 2), (["goon"], 1)):
            served = by_lm_eval(
                place,
                "local-completions",
                tasks,
                model="tiny",
                base_url=f"{url}/completions",
                tokenizer_backend="huggingface",
                tokenizer=str(place / "theirs"),
                max_length=POSITIONS + more,
                batch_size=4,
            )
            same(ours, served, tasks)
    assert len(answers(ours, "texts")) == len(texts())


@pytest.mark.parametrize("words", [["--help"], ["run", "-h"]])
def test_its_help_says_how_to_name_a_checkpoint(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "olm_train.cli", "lm-eval", *words],
        env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, _, rest = done.stdout.partition("What follows is the help of lm_eval.")
    assert "--model olm --model_args checkpoint=runs/first" in first
    assert "step: of a run" in first
    assert "usage: lm-eval" in rest
