"""`benchmarks/bench_train_step.py --gpu-sizes --peers`, at sizes a CPU takes in a moment."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest


def test_each_contestant_is_measured_alone_and_a_missing_peer_is_a_line(
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
    bench.main()
    *ours, peer = map(json.loads, capsys.readouterr().out.splitlines())
    assert [each["name"] for each in ours] == [
        "ours, documents masked",
        "ours, unmasked",
        "plain torch GPT, unmasked",
    ]
    assert all(each["tokens_per_second"] > 0 for each in ours)
    assert peer["name"] == "transformers Llama, unmasked"
    assert peer["skipped"] == f"{missing}: No such file or directory"
