"""A lock over two sources, and the folder of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.extensions.report.write import write_report
from olm_data.mixture.mix import mix
from olm_data.run_log.log import MetricsWriter, Step
from olm_data.run_log.run_folder import Sample

MANIFEST = """
version: 1
seed: 1
sequence_length: 16
packing: best_fit
sources:
  a: {data: ./a, max_epochs: 8}
  b: {data: ./b, max_epochs: 2}
groups: {both: {a: 1}}
stages:
  - {name: main, tokens: 320, weights: {both: 3, b: 1}}
  - {name: anneal, tokens: 160, weights: {b: 1}}
"""


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("report")
    for name, documents in {"a": texts(60), "b": [f"<b> {t} <b>" for t in texts(40)]}.items():
        make_dataset(
            [write_jsonl(folder / f"{name}.jsonl", documents)], tiny_tokenizer, folder / name
        )
    (folder / "manifest.yaml").write_text(MANIFEST)
    return Path(mix(str(folder / "manifest.yaml")).path)


@pytest.fixture(scope="module")
def alone(lock: Path) -> str:
    """The report of the mixture, without a run."""
    return write_report(str(lock), [], str(lock.with_name("r.html")), say=print).read_text()


@pytest.fixture(scope="module")
def whole(lock: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of the mixture with a run."""
    run = write_run(tmp_path_factory.mktemp("whole") / "run")
    return write_report(str(lock), [str(run)], str(run.with_name("r.html")), say=print).read_text()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def grow(run: Path) -> Callable[[int, int], None]:
    """What adds steps to the log of the run: from the first number to before the second."""

    def write(first: int, stop: int) -> None:
        writer = MetricsWriter(run)
        for step in range(first, stop):
            row, loss = 4 * ((step - 1) % 7), {"train/CE loss": 5.0}  # the lock has 30 rows
            writer.write(Step(step=step, tokens=64 * step, rows=(row, row + 4), metrics=loss))
        writer.close()

    return write


def write_run(folder: Path) -> Path:
    folder.mkdir()
    lines = [
        {
            "step": step,
            "tokens": 64 * step,
            "rows": [4 * step - 4, 4 * step],
            "train/CE loss": 6.0 - 0.1 * step,
            "optim/lr": 1e-3,
            "optim/total grad norm": 1.0 / step,
            "throughput/tokens per second": 1000.0 + step,
            "throughput/data wait share": 0.01,
        }
        for step in range(1, 6)
    ]
    lines.append({"step": 5, "eval": {"a": {"CE loss": 5.25, "PPL": 190.57, "tokens": 99}}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sample = Sample(
        prompt="def <f>",
        text="(x): return x & 1",
        ids=(1, 2),
        checkpoint="step00000005",
        temperature=0.8,
        top_k=50,
        seed=0,
    )
    (folder / "sample.json").write_bytes(sample.encode())
    return folder
