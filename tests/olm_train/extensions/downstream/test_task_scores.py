"""Scores of questions: the latest before a step is found, a damaged file is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_data.errors import InputError, ValidationError
from olm_data.storage.store import Store
from olm_train.extensions.downstream.downstream_evaluator import QuestionScores, last_scores


def scores(step: int, *values: float | None) -> QuestionScores:
    return QuestionScores(digest="d" * 64, metric="acc", step=step, values=values)


def test_the_latest_before_a_step_is_found(tmp_path: Path) -> None:
    assert last_scores(tmp_path, "downstream/mine") is None
    written = {step: scores(step, 1.0, None, step / 7) for step in (5, 100, 20)}
    for each in written.values():
        each.write(tmp_path, "downstream/mine")
    assert last_scores(tmp_path, "downstream/mine") == written[100]
    assert last_scores(tmp_path, "downstream/mine", before=100) == written[20]
    assert last_scores(tmp_path, "downstream/mine", before=5) is None
    scores(20, 0.5).write(tmp_path, "downstream/mine")
    assert last_scores(tmp_path, "downstream/mine", before=100) == scores(20, 0.5)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    scores(5, 1.0).write(tmp_path, "mine")
    path = tmp_path / "evaluations" / "mine" / "step00000005.json"
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValidationError, match="the scores are damaged"):
        last_scores(tmp_path, "mine")


def test_d3_scores_of_any_number_of_questions_that_are_written_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = scores(5, *[1 / 3] * 900_000)
    many.write(tmp_path, "mine")
    assert (tmp_path / "evaluations" / "mine" / "step00000005.json").stat().st_size > 16 << 20
    assert last_scores(tmp_path, "mine") == many
    monkeypatch.setattr(Store.put, "__kwdefaults__", {"limit": 1 << 20})
    with pytest.raises(InputError, match="nothing could read it again"):
        scores(6, *many.values).write(tmp_path, "mine")
    assert last_scores(tmp_path, "mine") == many
