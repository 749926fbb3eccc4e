"""A bad step is told with its documents, and gone back for as often as allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from olm_data.mixture.lock import Lock
from olm_train.data.loader import DataLoader
from olm_train.distributed.world import World
from olm_train.stability.gate import NonFinite
from olm_train.stability.report import BadSteps, NonFiniteError, write_report


def test_the_report_names_each_document_of_each_row(tiny_mixture: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad-step00000003.json"
    said = write_report(path, 3, "nan", "inf", Lock.read(tiny_mixture), [16, 17])
    report = json.loads(path.read_text())
    assert list(report) == ["step", "loss", "grad_norm", "rows"]
    assert (report["step"], report["loss"], report["grad_norm"]) == (3, "nan", "inf")
    assert [row["row"] for row in report["rows"]] == [16, 17]
    names = ["id", "input", "position", "position_kind", "shard", "document", "start", "stop"]
    for row in report["rows"]:
        assert list(row) == ["row", "stage", "source", "documents"]
        assert all(list(document) == names for document in row["documents"])
        assert sum(d["stop"] - d["start"] for d in row["documents"]) >= 32
    assert said.startswith("documents: ")
    assert report["rows"][0]["documents"][0]["input"] in said


def test_a_damaged_dataset_does_not_hide_the_bad_step(tiny_mixture: Path, tmp_path: Path) -> None:
    lock = Lock.read(tiny_mixture)
    path = tmp_path / "bad-step00000003.json"
    write_report(path, 3, "nan", "1.0", lock, [10**9])
    report = json.loads(path.read_text())
    assert report["rows"] == []
    assert report["incomplete"]


def test_a_run_goes_back_as_often_as_allowed(tiny_mixture: Path, tmp_path: Path) -> None:
    said: list[str] = []
    loader = DataLoader(tiny_mixture, global_batch_size=256, rank_microbatch_size=64)
    bad = BadSteps(loader, tmp_path, World(), 1, said.append)
    error = NonFiniteError(3, ((16, 24),), "loss nan", tmp_path / "report.json")
    for policy, possible in ((NonFinite.halt, True), (NonFinite.rewind, False)):
        with pytest.raises(NonFiniteError):
            bad.count_rewind(error, policy, can_go_back=possible)
    bad.count_rewind(error, NonFinite.rewind, can_go_back=True)
    assert (bad.rewinds, bad.rows) == (1, ((16, 24),))
    assert said[-1] == "rewinding, and leaving out rows [[16, 24]]"
    with pytest.raises(NonFiniteError):
        bad.count_rewind(error, NonFinite.rewind, can_go_back=True)
