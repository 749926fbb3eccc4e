"""Promises of the report: one self-contained page that shows what the lock and the logs say."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command import inside
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import InputError
from olm_data.mixture.explain import tree
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import mix
from olm_data.page import svg, whole_numbers
from olm_data.report.rows import spread
from olm_data.report.run import TrainedRun, headline
from olm_data.report.write import write_report
from olm_data.rows.views import LockRows

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


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("report")
    for name, documents in {"a": texts(60), "b": [f"<b> {t}" for t in texts(40)]}.items():
        make_dataset(
            [write_jsonl(folder / f"{name}.jsonl", documents)], tiny_tokenizer, folder / name
        )
    (folder / "manifest.yaml").write_text(MANIFEST)
    return Path(mix(str(folder / "manifest.yaml")).path)


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
    page.feed(write_report(str(lock), [str(run)], str(tmp_path / "r.html"), say=print).read_text())
    text = " ".join(page.text)
    for part in ("Stages over the run", "Document lengths", "held-out a", "5.2500"):
        assert part in text
    for part in ("Throughput", "1,003", "1.00 %", "def <f>", "return x & 1", "temperature 0.8"):
        assert part in text


def test_u11_the_headline_is_from_evaluation_and_says_on_what_how_long_and_by_which_command(
    lock: Path, run: Path, tmp_path: Path
) -> None:
    start = {
        "step": 0,
        "rewound": 0,
        "lock": Lock.read(lock).digest,
        "global_batch_size": 64,
        "world_size": 2,
        "skip": [],
        "time": 1000.0,
        "device": "cpu AVX2",
        "parameters": 1_600_000,
        "command": "torchrun --nproc-per-node=2 train.yaml",
    }
    starts = [start, {**start, "step": 3, "time": 5000.0}]
    (run / "starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in starts))
    times = [1010.0, 1020.0, 1030.0, 5040.0, 5050.0, 5051.5]  # 30 s, a night, then 51.5 s
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines = [json.dumps({**json.loads(a), "time": t}) for a, t in zip(lines, times, strict=True)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    facts = dict(headline(TrainedRun.read(run)))
    assert list(facts)[:2] == ["loss on held-out a", "perplexity on a"]
    assert facts["loss on held-out a"] == "5.250"
    assert facts["perplexity on a"] == "190.57"
    assert facts["parameters"] == "1.6 M"
    assert facts["device"] == "2 x cpu AVX2"
    assert facts["time"] == "1 min 22 s"
    assert facts["last line"] == "1970-01-01 01:24 UTC"
    text = write_report(str(lock), [str(run)], str(tmp_path / "r.html"), say=print).read_text()
    assert "torchrun --nproc-per-node=2 train.yaml" in text
    assert "<b>190.57</b>" in text


def test_u11_two_runs_are_overlaid_and_one_of_another_mixture_is_told(
    lock: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (other / "metrics.jsonl").write_text(
        (run / "metrics.jsonl").read_text().replace("5.25", "4.75")
    )
    start = {"step": 0, "rewound": 0, "lock": "f" * 64, "global_batch_size": 64, "world_size": 1}
    (other / "starts.jsonl").write_text(json.dumps({**start, "skip": []}) + "\n")
    output = tmp_path / "r.html"
    done = inside(capsys, "report", lock, "--run", run, "--run", other, "--output", output)
    assert done.returncode == 0, done.stderr
    page = _Links()
    page.feed(output.read_text())
    assert {"run", "other", "5.250", "4.750", "5.2500", "4.7500"} <= set(page.text)
    assert "run: held-out a" in page.text  # in the legend of the picture
    assert "other: held-out a" in page.text
    assert any("another lock" in text and "f" * 12 in text for text in page.text)


def test_u11_each_picture_says_in_words_what_it_shows(
    lock: Path, run: Path, tmp_path: Path
) -> None:
    text = write_report(str(lock), [str(run)], str(tmp_path / "r.html"), say=print).read_text()
    pictures = re.findall("<svg[^>]*>", text)
    assert len(pictures) >= 7
    assert all('role="img" aria-label="' in picture for picture in pictures)
    assert "a ends at 5.250" in text


def test_u11_an_axis_of_counts_has_whole_numbers() -> None:
    drawn = svg(lambda axes: (axes.plot([1, 2], [0, 1]), whole_numbers(axes.xaxis)), "counts")
    labels = re.findall(r">([\d.,]+)</text>", drawn)
    assert {"1", "2"} <= set(labels)
    assert "1.2" not in labels


def test_report_fetches_nothing(lock: Path, run: Path, tmp_path: Path) -> None:
    page = _Links()
    page.feed(write_report(str(lock), [str(run)], str(tmp_path / "r.html"), say=print).read_text())
    assert page.fetched == []


def test_report_without_a_run_shows_the_mixture_alone(lock: Path, tmp_path: Path) -> None:
    text = write_report(str(lock), [], str(tmp_path / "r.html"), say=print).read_text()
    assert "Document lengths" in text
    assert "Throughput" not in text


def test_a_folder_that_is_no_run_is_refused(lock: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        write_report(str(lock), [str(tmp_path)], str(tmp_path / "r.html"), say=print)
    assert not (tmp_path / "r.html").exists()


def test_report_shows_stages_epochs_and_packing_as_the_lock_has_them(
    lock: Path, tmp_path: Path
) -> None:
    page = _Links()
    page.feed(write_report(str(lock), [], str(tmp_path / "r.html"), say=print).read_text())
    planned, cells = Lock.read(lock), set(page.text)
    for stage in planned.stages:
        assert {stage.name, f"{stage.rows:,}"} <= cells
    for i, source in enumerate(planned.sources):
        rows = sum(stage.rows_by_source[i] for stage in planned.stages)
        assert {f"{rows / source.rows:.4f}", f"{rows * 16:,}", f"{source.rows:,}"} <= cells
        assert source.plan is not None
        assert f"{1 - source.plan.tokens / (source.rows * 16):.4%}" in cells
    assert {"8", "2"} <= cells  # max_epochs
    main, anneal = tree(planned)
    group = main["members"][0]
    assert (group["name"], group["members"][0]["name"]) == ("both", "a")
    for node in (*main["members"], *group["members"], *anneal["members"]):
        assert {node["name"], f"{node['rows'] * 16:,}"} <= cells
        for share in ("share_wanted", "share_compiled", "share_got"):
            assert f"{100 * node[share]:.3f} %" in cells


def test_report_shows_rows_of_the_run_with_the_borders_of_their_documents(
    lock: Path, tmp_path: Path
) -> None:
    text = write_report(str(lock), [], str(tmp_path / "r.html"), say=print).read_text()
    total = Lock.read(lock).total_rows
    for number in ((2 * i + 1) * total // 12 for i in range(6)):
        row = LockRows(Lock.read(lock)).view(number)
        assert f"<h3>row {number}: stage {row.stage}, source {row.source}, epoch" in text
        for piece in row.pieces:
            name = piece.id or f"document {piece.document}"
            assert f'title="{name}: {piece.stop - piece.start} tokens"' in text
    assert "&lt;b&gt;" in text  # what a document holds is text, never markup
    assert "<b> " not in text


@given(st.integers(0, 10**15), st.integers(1, 300))
def test_sampled_rows_are_different_and_in_the_run(total: int, most: int) -> None:
    rows = spread(total, most).tolist()
    assert len(rows) == min(total, most)
    assert rows == sorted(set(rows))
    assert all(0 <= row < total for row in rows)
