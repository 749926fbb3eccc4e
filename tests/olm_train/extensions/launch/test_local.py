"""`olm-train launch --to local`: a run of two ranks from a snapshot; this machine is the node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.launched import launch, write_project
from support.runs import metrics

pytestmark = pytest.mark.slow


def test_a_run_is_of_the_snapshot_and_says_so(tiny_mixture: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    config = write_project(project, tiny_mixture, ranks_per_node=2)
    done = launch(config, "--to", "local")
    assert done.returncode == 0, done.stderr
    assert "code one" in done.stderr
    digest = next((tmp_path / "snapshots").glob("*/snapshot.json")).parent.name
    run = project / "run"
    assert [m["step"] for m in metrics(run) if "rows" in m] == list(range(1, 25))
    assert json.loads((run / "environment.json").read_text())["code"] == digest
    environment = json.loads((run / "config.json").read_text())["trainer"]["callbacks"]
    assert environment["environment"]["snapshot"] == digest
    found = json.loads((run / "preflight.json").read_text())
    assert {*found["rates"]} == {
        "matmul", "all_reduce", "broadcast", "all_gather", "reduce_scatter",
    }  # fmt: skip
    assert all(rate > 0 for rates in found["rates"].values() for rate in rates)
    assert found["nodes"][0]["code"] == digest
