"""Exports beside a run: made, said, made again after a kill, and never in the way of a step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.hf_exports import receipt_of
from support.polling import wait_until
from support.runs import build_trainer, command, config_values, environment, metrics
from support.runs import run as train

from olm_data.errors import UsageError
from olm_data.run_log.metric_names import HF_EXPORT_FAILURES
from olm_train.extensions.hf_export.hf_exporter import LOG, HFExporterCallback

QUIET = "--trainer.callbacks.lm_evaluator.enabled=false"
SHORT = (QUIET, "--trainer.hard_stop={value: 8, unit: steps}")


def exports(folder: Path) -> list[str]:
    found = folder if folder.name != "run" else folder / "hf"
    return sorted(path.name for path in found.iterdir()) if found.exists() else []


@pytest.mark.slow  # processes that import torch
def test_exports_are_made_beside_the_run_whose_losses_stay_and_a_failed_one_is_said_and_counted(
    tiny_mixture: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sparse = "--trainer.callbacks.checkpointer={save_interval: 8, ephemeral_save_interval: 5}"
    build_trainer(tiny_mixture, tmp_path / "plain", *SHORT, sparse).fit()
    out, run = tmp_path / "out", tmp_path / "run"
    (out / "step00000005").mkdir(parents=True)
    (out / "step00000005" / "mine.txt").write_text("mine")
    given = HFExporterCallback(
        export_interval=5, output=str(out), dtype="float32", shard_size="1KB", timeout=600
    )
    build_trainer(tiny_mixture, run, *SHORT, sparse, callbacks={"hf_exporter": given}).fit()
    lines = metrics(run)
    for line in lines:
        line.pop(HF_EXPORT_FAILURES, None)
    assert lines == metrics(tmp_path / "plain")
    said = capfd.readouterr().err
    assert "warning: the export of step 5 failed: the output holds something else" in said
    assert [path.name for path in (out / "step00000005").iterdir()] == ["mine.txt"]
    assert given.state_dict()["failures"] == 1
    assert (run / LOG).exists()
    assert "exported step 8 as LlamaForCausalLM" in said
    assert exports(out) == ["step00000005", "step00000008"]
    receipt = receipt_of(out / "step00000008")
    assert receipt.step == 8
    assert (receipt.claim.dtype, receipt.claim.shard_bytes) == ("float32", 1000)
    assert receipt.verified.model is None  # `verify: files` beside a run
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*")}
    build_trainer(tiny_mixture, run, *SHORT, sparse, callbacks={"hf_exporter": given}).fit()
    assert before == {path: path.stat().st_mtime_ns for path in out.glob("*/*")}


@pytest.mark.slow  # whole runs as processes, one of them killed
def test_a_killed_run_leaves_nothing_that_looks_whole_and_its_next_start_makes_it(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    run, config = tmp_path / "run", tmp_path / "train.yaml"
    values: dict[str, Any] = config_values(tiny_mixture, run)
    values["trainer"]["hard_stop"] = {"value": 7, "unit": "steps"}
    callbacks = values["trainer"]["callbacks"]
    del callbacks["lm_evaluator"]
    callbacks["hf_exporter"] = {"export_interval": 4, "export_on_finish": False, "timeout": 600}
    config.write_text(yaml.safe_dump(values))
    process = subprocess.Popen(
        command(config), env=environment(), stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        # the log is there as soon as the first child is begun
        wait_until((run / LOG).exists, "an export", seconds=600)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    for name in exports(run):
        if not name.startswith("."):
            receipt_of(run / "hf" / name)  # whole
    done = train(config)
    assert done.returncode == 0, done.stderr
    assert exports(run) == ["step00000004"]
    assert receipt_of(run / "hf" / "step00000004").step == 4
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_a_model_that_cannot_be_exported_is_refused_before_the_first_step(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    odd = "--model.feed_forward=gelu"
    on = "--trainer.callbacks.hf_exporter={}"
    with pytest.raises(UsageError, match="feed_forward is gelu"):
        build_trainer(tiny_mixture, tmp_path / "run", QUIET, odd, on)
    build_trainer(tiny_mixture, tmp_path / "run", QUIET, odd, on[:-1] + "enabled: false}")


def test_what_exports_nothing_is_refused(tiny_mixture: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exports nothing"):
        HFExporterCallback(export_on_finish=False)
    with pytest.raises(UsageError, match="is not a size"):
        HFExporterCallback(shard_size="much")
    off = "--trainer.callbacks={checkpointer: {enabled: false}, hf_exporter: {verify: auto}}"
    with pytest.raises(UsageError, match="no checkpoints to export"):
        build_trainer(tiny_mixture, tmp_path / "run", off)
