"""Promises of the report: one self-contained page that shows what the lock and the logs say."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.datasets import write_dataset

from olm_data.errors import InputError
from olm_data.mixture.compile import compile_lock, open_sources, read_mixture
from olm_data.report.write import write_report

MANIFEST = """
version: 1
seed: 1
sequence_length: 16
packing: concat
sources:
  a: {data: ./a}
  b: {data: ./b}
stages:
  - {name: main, tokens: 320, weights: {a: 3, b: 1}}
"""


class _Links(HTMLParser):
    """Collects everything a browser would fetch, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.fetched.append(str(value))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "a", [[[1] * n for n in (40, 7, 200, 30)], [[2] * 90]])
    write_dataset(tmp_path / "b", [[[3] * 5] * 40])
    (tmp_path / "manifest.yaml").write_text(MANIFEST)
    mixture = read_mixture(tmp_path / "manifest.yaml")
    path = tmp_path / "manifest.lock.json"
    compile_lock(mixture, open_sources(mixture)).write(path)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
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
    sample = {"prompt": "def <f>", "text": "(x): return x & 1", "temperature": 0.8}
    (folder / "sample.json").write_text(json.dumps(sample))
    return folder


def test_report_shows_mixture_training_speed_and_sample(
    lock: Path, run: Path, tmp_path: Path
) -> None:
    page = _Links()
    page.feed(write_report(str(lock), str(run), str(tmp_path / "r.html")).read_text())
    text = " ".join(page.text)
    for part in ("Mixture", "75.000 %", "Document lengths", "validation: a", "5.2500"):
        assert part in text
    for part in ("Throughput", "1,003", "1.00 %", "def <f>", "return x & 1", "temperature 0.8"):
        assert part in text


def test_report_fetches_nothing(lock: Path, run: Path, tmp_path: Path) -> None:
    page = _Links()
    page.feed(write_report(str(lock), str(run), str(tmp_path / "r.html")).read_text())
    assert page.fetched == []


def test_report_without_a_run_shows_the_mixture_alone(lock: Path, tmp_path: Path) -> None:
    text = write_report(str(lock), None, str(tmp_path / "r.html")).read_text()
    assert "Document lengths" in text
    assert "Throughput" not in text


def test_a_folder_that_is_no_run_is_refused(lock: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        write_report(str(lock), str(tmp_path), str(tmp_path / "r.html"))
    assert not (tmp_path / "r.html").exists()
