"""What a user reads while a run goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.runs import build_trainer

from olm_data.errors import UsageError


def test_one_line_an_interval_and_at_both_ends(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_trainer(
        tiny_mixture, tmp_path, "--trainer.callbacks.console_logger.log_interval=3", stop=7
    ).fit()
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == [
        "1/7", "3/7", "6/7", "7/7",
    ]  # fmt: skip
    assert re.fullmatch(
        r"step 6/7   loss \d\.\d{4}   lr \S+   grad norm \S+   \S+( K)? tok/s   wait \S+%   ETA .+",
        next(line for line in lines if line.startswith("step 6/7")),
    )
    assert lines[0].startswith("training 21.6 K parameters to step 7 (1.79 K tokens) on 1 CPU rank")
    assert lines[1].startswith(
        "attention sdpa; loss plain: logits of a micro-batch need 0.000655 GB"
    )
    assert lines[-1] == "finished at step 7 (1.79 K tokens)"


def test_metrics_that_are_asked_for_get_lines_at_their_own_interval(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = "--trainer.callbacks.console_logger"
    asked = (f"{prefix}.metrics=[optim/lr*, train/tokens]", f"{prefix}.log_interval=7")
    shown = []
    for more in ((), (f"{prefix}.metrics_log_interval=3",)):
        build_trainer(tiny_mixture, tmp_path / str(len(more)), *asked, *more, stop=7).fit()
        lines = capsys.readouterr().err.splitlines()
        shown.append([line for line in lines if line.startswith("metrics of step")])
        names = {line.split(" = ")[0].strip() for line in lines if line.startswith("    ")}
        assert names == {"optim/lr", "train/tokens"}
    assert shown[0] == ["metrics of step 1", "metrics of step 7"]
    assert shown[1] == [f"metrics of step {step}" for step in (1, 3, 6, 7)]
    with pytest.raises(UsageError, match="has no effect without metrics"):
        build_trainer(tiny_mixture, tmp_path, f"{prefix}.metrics_log_interval=3")


def test_rows_at_the_end_of_the_mixture_that_are_not_trained_on_are_said(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "note: 2 rows at the end fill no step and are not trained on"
    size = "--data_loader.global_batch_size=6080"  # 190 of the mixture's 192 rows
    micro = "--train_module.rank_microbatch_size=3040"
    constant = "--train_module.scheduler={name: constant}"
    build_trainer(tiny_mixture, tmp_path, size, micro, constant, quiet=True).fit()
    assert note in capsys.readouterr().err.splitlines()
    build_trainer(tiny_mixture, tmp_path / "stopped", quiet=True, stop=1).fit()
    assert "at the end fill no step" not in capsys.readouterr().err
