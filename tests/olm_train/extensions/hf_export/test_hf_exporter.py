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
from olm_train.extensions.hf_export.hf_exporter import LOG, HFExporterCallback

QUIET = "--trainer.callbacks.lm_evaluator.enabled=false"
SHORT = (QUIET, "--trainer.hard_stop={value: 8, unit: steps}")


def exports(folder: Path) -> list[str]:
    found = folder if folder.name != "run" else folder / "hf"
    return sorted(path.name for path in found.iterdir()) if found.exists() else []


@pytest.mark.slow  # processes that import torch
def test_exports_are_made_beside_the_run_and_losses_do_not_change(
    tiny_mixture: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sparse = "--trainer.callbacks.checkpointer={save_interval: 8, ephemeral_save_interval: 3}"
    build_trainer(tiny_mixture, tmp_path / "plain", *SHORT, sparse).fit()
    given = HFExporterCallback(export_interval=3, dtype="float32", shard_size="1KB", timeout=600)
    run = tmp_path / "run"
    build_trainer(tiny_mixture, run, *SHORT, sparse, callbacks={"hf_exporter": given}).fit()
    assert metrics(run) == metrics(tmp_path / "plain")
    assert exports(run) == ["step00000003", "step00000006", "step00000008"]
    for name in exports(run):
        receipt = receipt_of(run / "hf" / name)
        assert receipt.step == int(name[4:])
        assert (receipt.claim.dtype, receipt.claim.shard_bytes) == ("float32", 1000)
        assert receipt.verified.model is None  # `verify: files` beside a run
    assert "exported step 8 as LlamaForCausalLM" in capfd.readouterr().err
    before = {path: path.stat().st_mtime_ns for path in run.glob("hf/*/*")}
    build_trainer(tiny_mixture, run, *SHORT, sparse, callbacks={"hf_exporter": given}).fit()
    assert before == {path: path.stat().st_mtime_ns for path in run.glob("hf/*/*")}


@pytest.mark.slow  # processes that import torch
def test_a_failed_export_is_said_and_counted_and_the_run_goes_on(
    tiny_mixture: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, run = tmp_path / "out", tmp_path / "run"
    (out / "step00000002").mkdir(parents=True)
    (out / "step00000002" / "mine.txt").write_text("mine")
    values = {"export_interval": 2, "output": str(out), "export_on_finish": False, "timeout": 600}
    given = HFExporterCallback(**values)  # type: ignore[arg-type]
    short = (QUIET, "--trainer.hard_stop={value: 3, unit: steps}")
    build_trainer(tiny_mixture, run, *short, callbacks={"hf_exporter": given}).fit()
    said = capfd.readouterr().err
    assert "warning: the export of step 2 failed: the output holds something else" in said
    assert [path.name for path in (out / "step00000002").iterdir()] == ["mine.txt"]
    assert (run / LOG).exists()
    assert given.state_dict()["failures"] == 1
    again = HFExporterCallback(**values)  # type: ignore[arg-type]
    build_trainer(tiny_mixture, run, *SHORT, callbacks={"hf_exporter": again}).fit()
    assert exports(out) == ["step00000002", "step00000004", "step00000006", "step00000008"]
    assert [path.name for path in (out / "step00000002").iterdir()] == ["mine.txt"]
    assert [receipt_of(out / f"step0000000{n}").step for n in (4, 6, 8)] == [4, 6, 8]


@pytest.mark.slow  # whole runs as processes, one of them killed
def test_a_killed_run_leaves_nothing_that_looks_whole_and_its_next_start_makes_it(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    run, config = tmp_path / "run", tmp_path / "train.yaml"
    values: dict[str, Any] = config_values(tiny_mixture, run)
    values["trainer"]["hard_stop"] = {"value": 8, "unit": "steps"}
    callbacks = values["trainer"]["callbacks"]
    del callbacks["lm_evaluator"]
    callbacks["hf_exporter"] = {"export_interval": 4, "timeout": 600, "dtype": "float32"}
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
    assert exports(run) == ["step00000004", "step00000008"]
    assert [receipt_of(run / "hf" / name).step for name in exports(run)] == [4, 8]
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
