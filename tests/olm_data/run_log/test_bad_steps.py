"""Reports of bad steps are read back as they were written, and found in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_data.errors import ValidationError
from olm_data.run_log.run_folder import BadDocument, BadRow, BadStep, bad_step_files

DOCUMENT = BadDocument("id-1", "web.jsonl", 17, "line", "shard-0", 3, 0, 9)
BAD = BadStep(step=12, loss="nan", grad_norm="1.0", rows=[BadRow(96, "main", "web", [DOCUMENT])])


def test_a_report_comes_back_and_names_its_documents(tmp_path: Path) -> None:
    path = tmp_path / "spike-step00000012.json"
    BAD.write(path)
    assert BadStep.read(path) == BAD
    assert BAD.places() == ["web web.jsonl line 17"]


def test_they_are_found_by_step_and_nothing_else_is(tmp_path: Path) -> None:
    for name in ("spike-step00000012.json", "bad-step00000003.json", "x-step1.json", "bad-step"):
        (tmp_path / name).write_text("{}")
    found = [(step, kind) for step, kind, _ in bad_step_files(tmp_path)]
    assert found == [(3, "bad"), (12, "spike")]


def test_a_malformed_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad-step00000003.json"
    path.write_text('{"step": "x"}')
    with pytest.raises(ValidationError, match="malformed"):
        BadStep.read(path)
