"""`benchmarks/bench_train_step.py --gpu-sizes --peers`, at sizes a CPU takes in a moment."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest


def test_each_contestant_is_measured_alone_and_a_missing_peer_is_a_line_and_an_error(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    bench = importlib.import_module("bench_train_step")
    monkeypatch.setattr(bench, "GPU_SIZES", ("olm-1m",))
    monkeypatch.setattr(bench, "GPU_LENGTHS", (32,))
    missing = tmp_path / "python"
    options = ["--gpu-sizes", "--peers", "--peer-python", str(missing), "--rows", "1"]
    options += ["--rounds", "1", "--vocab-size", "128", "--mean-document", "8", "--json"]
    monkeypatch.setattr(sys, "argv", ["bench_train_step.py", *options])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 1
    *ours, peer = map(json.loads, capsys.readouterr().out.splitlines())
    assert [each["name"] for each in ours] == [
        "ours, documents masked",
        "ours, unmasked",
        "plain torch GPT, unmasked",
    ]
    assert all(each["tokens_per_second"] > 0 for each in ours)
    assert peer["name"] == "transformers Llama, unmasked"
    assert peer["failed"] == f"{missing}: No such file or directory"


def test_without_the_peer_that_was_asked_for_no_comparison_is_printed(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    bench = importlib.import_module("bench_train_step")
    missing = tmp_path / "python"
    options = ["--preset", "olm-1m", "--peers", "--peer-python", str(missing), "--rows", "1"]
    options += ["--rounds", "1", "--vocab-size", "128", "--sequence-length", "32"]
    monkeypatch.setattr(sys, "argv", ["bench_train_step.py", *options])
    with pytest.raises(SystemExit, match=f"error: transformers Llama.*{missing}: No such file"):
        bench.main()
    assert not capsys.readouterr().out
