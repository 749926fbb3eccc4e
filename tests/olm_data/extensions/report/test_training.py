"""A report says of runs what their logs say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.command import inside
from support.html_page import HtmlPage

from olm_data.extensions.report.training import TrainedRun, headline, held_out_section
from olm_data.extensions.report.write import write_report
from olm_data.mixture.lock import Lock
from olm_data.run_log.run_folder import StepSamples, WrittenText, write_samples


def test_report_shows_mixture_training_speed_and_sample(
    lock: Path, run: Path, tmp_path: Path
) -> None:
    page = HtmlPage(
        write_report(str(lock), [str(run)], str(tmp_path / "r.html"), say=print).read_text()
    )
    text = " ".join(page.text)
    for part in ("Stages over the run", "Document lengths", "Held-out losses", "5.2500"):
        assert part in text
    for part in ("Throughput", "1,003", "1.00 %", "def <f>", "return x & 1", "temperature 0.8"):
        assert part in text


def test_texts_of_steps_are_shown_by_prompt_the_latest_first(
    lock: Path, run: Path, tmp_path: Path
) -> None:
    for step in (2, 5):
        texts = tuple(WrittenText(p, f"{p}after{step}<b>", "stop") for p in ("one", ""))
        samples = StepSamples(step=step, texts=texts, temperature=0.7, top_k=9, seed=3)
        write_samples(run, samples)
    page = HtmlPage(
        write_report(str(lock), [str(run)], str(tmp_path / "r.html"), say=print).read_text()
    )
    text = " ".join(page.text)
    for part in ("Samples of run", "oneafter5<b>", "a new document", "top_k 9, seed 3"):
        assert part in text
    assert (
        text.index("oneafter5")
        < text.index("oneafter2")
        < text.index("after5<b>", 9 + text.index("oneafter2"))
    )


def test_the_headline_is_from_evaluation_and_says_on_what_how_long_and_by_which_command(
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
    assert list(facts)[:3] == ["loss on held-out a", "tokens trained", "time"]
    assert facts["loss on held-out a"] == "5.250"
    assert facts["parameters"] == "1.6 M"
    assert facts["device"] == "2 x cpu AVX2"
    assert facts["time"] == "1 min 22 s"
    assert facts["last line"] == "1970-01-01 01:24 UTC"
    text = write_report(str(lock), [str(run)], str(tmp_path / "r.html"), say=print).read_text()
    assert "torchrun --nproc-per-node=2 train.yaml" in text
    assert "<b>5.250</b>" in text
    assert ">190.57</td>" in text


def test_two_runs_are_overlaid_and_one_of_another_mixture_is_told(
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
    page = HtmlPage(output.read_text())
    assert {"run", "other", "5.250", "4.750", "5.2500", "4.7500"} <= set(page.text)
    assert {"run: a", "other: a"} <= set(page.text)
    assert any("another lock" in text and "f" * 12 in text for text in page.text)


def test_bits_per_byte_stand_beside_the_loss_and_groups_have_rows(tmp_path: Path) -> None:
    values = {"CE loss": 2.0, "PPL": 7.4, "BPB": 1.25, "tokens": 9}
    values |= {"BPB/language=de": 1.5, "CE loss/language=de": 2.25, "tokens/language=de": 4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 5, "eval": {"web": values}}) + "\n")
    run = TrainedRun.read(tmp_path)
    assert dict(headline(run))["bits per byte on held-out web"] == "1.250"
    page = held_out_section([run])
    assert "1.2500" in page
    assert "web, language de" in page
    assert "1.5000" in page
