"""`olm-train merge`: checkpoints in, one of weights out, which other commands read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.forked import forked
from support.runs import environment, six_steps

from olm_train.extensions.averaging.command import main
from olm_train.extensions.downstream.command import main as evaluate
from olm_train.extensions.generate.command import main as generate
from olm_train.extensions.hf_export.command import main as export


@pytest.fixture(scope="module")
def run(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return six_steps(tiny_mixture, tmp_path_factory.mktemp("merge-command") / "run")


def test_what_it_writes_is_read_by_generate_evaluate_and_export(
    run: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    out = str(tmp_path / "merged")
    command = [str(run / "step00000002"), str(run / "step00000004"), str(run), "--out", out]
    words = ("merge", *command, "--weights", "1,2,3")
    done = forked("olm_train.cli", *words, environment=environment(), timeout=600)
    assert done.returncode == 0, done.stderr
    shares = [line.split()[-1] for line in done.stdout.splitlines()[-3:]]
    assert shares == ["16.6667%", "33.3333%", "50.0000%"]
    assert done.stderr.endswith(f"the mean of 3 weights: {out}\n")
    held = str(tiny_mixture.parent / "held")
    losses = {}
    for model in (str(run), out):
        found = CliRunner().invoke(evaluate, [model, "--data", held, "--json"])
        assert found.exit_code == 0, found.output
        losses[model] = json.loads(found.stdout)["datasets"][held]["CE loss"]
    assert losses[out] != losses[str(run)]
    assert CliRunner().invoke(generate, [out, "--max-new-tokens", "3"]).exit_code == 0
    written = CliRunner().invoke(export, [out, "--output", str(tmp_path / "exported")])
    assert written.exit_code == 0, written.output
    again = CliRunner().invoke(evaluate, [str(tmp_path / "exported"), "--data", held, "--json"])
    assert json.loads(again.stdout)["datasets"][held]["CE loss"] == losses[out]


def test_weights_by_name_and_json(run: Path, tmp_path: Path) -> None:
    given = [str(run / "step00000004"), str(run), "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(main, [*given, "--weights", "linear", "--json"])
    assert found.exit_code == 0, found.output
    merge = json.loads(found.stdout)
    assert (merge["weights"], merge["first"], merge["last"], merge["count"]) == ("linear", 4, 6, 2)
    assert [part["share"] for part in merge["of"]] == pytest.approx([1 / 3, 2 / 3])


def test_what_is_neither_name_nor_numbers_is_a_usage_error(run: Path, tmp_path: Path) -> None:
    given = [str(run), "-o", str(tmp_path / "out"), "--weights", "cosine"]
    found = CliRunner().invoke(main, given)
    assert found.exit_code == 2
    assert "'cosine' is neither uniform, linear, decay nor numbers" in found.stderr
