"""`benchmarks/bench_gpu.py` with stand-ins on a CPU: kinds of rows, failures, lack of time."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., str]


@pytest.fixture
def bench(imported: Any) -> Any:
    return imported("bench_gpu")


@pytest.fixture
def run(bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def printed(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--tiny", "--device", "cpu", *options])
        bench.main()
        return capsys.readouterr().out

    return printed


def rows_of(text: str) -> list[dict[str, str]]:
    names, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


@pytest.mark.slow
def test_each_row_is_measured_or_says_why_not(run: Run) -> None:
    text = run("--no-tests")
    rows = rows_of(text)
    failed = {(row["attention"], row["products"]) for row in rows if "failed" in row["tokens/s"]}
    expected = {("flex", "bf16")}  # torch has no backward pass of it on a CPU
    if importlib.util.find_spec("torchao") is None:
        expected |= {("sdpa", "rowwise"), ("sdpa", "tensorwise")}
        assert "failed: float8_config needs the package torchao" in text
    assert failed == expected
    assert {"olm-125m", "olm-350m", "olm-1b", "like nanochat d24"} < {row["model"] for row in rows}
    for row in rows:
        if "failed" not in row["tokens/s"]:
            assert float(row["tokens/s"].replace(",", "")) > 0
            assert 4 < float(row["loss"]) < 8  # 256 ids: about 5.5 nats
    assert {row["documents"] for row in rows} == {"masked", "not masked"}
    assert "| 16 experts, 2 a token |" in text
    assert "tokens/s, 4 texts of 4 new tokens together." in text
    assert "Not run" not in text


def test_what_there_is_no_time_for_is_named(bench: Any, run: Run) -> None:
    text = run("--minutes", "-1")
    assert rows_of(text) == []
    _, _, named = text.partition("Not run, for want of time")
    assert named.count("\n* ") == 1 + len(bench.stand_ins()) + 1
    assert "* tests marked gpu\n* olm-125m, 32, masked" in named
    assert named.endswith("* generation\n")


def test_goals_are_of_the_rows_that_they_were_set_for(bench: Any) -> None:
    goals = {row: row.goal for row in bench.ROWS if row.goal}
    assert [(row.model, row.masked, goal) for row, goal in goals.items()] == [
        ("olm-125m", True, 470e3),
        ("olm-350m", True, 185e3),
        ("olm-1b", True, 58e3),
        ("like nanochat d24", False, 100e3),
        ("olm-125m", False, 470e3),
        ("olm-350m", False, 185e3),
        ("olm-1b", False, 58e3),
    ]
    assert len(set(bench.ROWS)) == len(bench.ROWS)


@pytest.mark.slow
def test_the_tests_of_gpus_are_run_and_summed_up(bench: Any) -> None:
    found = bench.tests_of_gpus(tiny=True)
    assert found.startswith("exit code 0; ")
    assert "passed" in found or "needs a GPU" in found
    assert " in " in found.rpartition(";")[2]
