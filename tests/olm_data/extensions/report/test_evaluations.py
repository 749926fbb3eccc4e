"""The latest evaluation of each set and task, and points of curves."""

from __future__ import annotations

import json
from pathlib import Path

from olm_data.extensions.report.evaluations import EvaluationTable, TaskScore, plus_minus, point
from olm_data.extensions.report.run_view import RunView
from olm_data.extensions.watching.watched import EVAL, Measured, WatchedEvaluation
from olm_data.run_log.log import Evaluation
from olm_data.storage.store import Store

TASK = {
    "acc": 0.25, "len_norm": 0.5, "BPB": 1.125, "len_norm stderr": 0.0625,
    "len_norm change": 0.03125, "len_norm change stderr": 0.015625, "questions": 64.0,
}  # fmt: skip
SET = {"CE loss": 2.0, "PPL": 7.4, "BPB": 1.25, "CE loss/language=de": 2.5, "BPB/language=de": 1.5}


def entry(step: int, **results: dict[str, float | None]) -> Evaluation:
    named = {name.replace("_", "/"): values for name, values in results.items()}
    return Evaluation(step=step, results=named)


def test_a_point_has_losses_bits_and_scores_apart() -> None:
    found = point(entry(5, web=dict(SET), downstream_arc=dict(TASK), empty={"CE loss": None}))
    assert (found.losses, found.bits) == ({"web": 2.0}, {"web": 1.25})
    assert found.scores == {"downstream/arc": TaskScore("len_norm", 0.5, 0.0625)}


def test_what_stands_is_the_latest_by_step_and_not_by_time() -> None:
    standing = EvaluationTable([entry(10, web=dict(SET)), entry(5, web={"CE loss": 9.0})])
    assert [(row.group, row.step, row.bits) for row in standing.sets()] == [
        ("", 10, 1.25), ("language de", 10, 1.5),
    ]  # fmt: skip
    standing.take(entry(15, web={"CE loss": 1.0}, t={**TASK, "len_norm stderr": None}))
    assert [(row.name, row.step, row.loss) for row in standing.sets()] == [("web", 15, 1.0)]
    (task,) = standing.tasks()
    assert (task.score.error, plus_minus(task.score)) == (None, "0.5000")
    assert task.change is not None
    assert plus_minus(task.change, "+") == "+0.0312 ± 0.0156"


def write(run: Path, *lines: dict[str, object]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def watched(run: Path, step: int, **results: dict[str, float | None]) -> None:
    logged = entry(step, **results)
    found = WatchedEvaluation(
        checkpoint=f"step{step:08d}",
        digest="a" * 64,
        step=step,
        time=float(step),
        data={name: Measured(digest="d", sequence_length=8) for name in logged.results},
        results=logged.results,
    )
    found.write(Store(str(run)).child(EVAL))


def test_a_page_gets_what_watchers_found_at_its_step_once_the_log_is_there(tmp_path: Path) -> None:
    steps = [{"step": n, "tokens": 8 * n, "rows": [n - 1, n], "train/CE loss": 5.0} for n in (1, 2)]
    write(tmp_path, *steps, {"step": 2, "eval": {"web": SET}})
    view = RunView(tmp_path, "run")
    first = view.update()
    watched(tmp_path, 1, downstream_arc=dict(TASK))
    watched(tmp_path, 9, web={"CE loss": 1.0})  # of a step that the log has lost
    more = view.update(first.token)
    assert [each.step for each in more.evaluations] == [1]
    assert [(row.name, row.step) for row in more.words.tasks] == [("downstream/arc", 1)]
    assert [row.step for row in more.words.sets] == [2, 2]
    assert ("bits/byte on web", "1.250") in more.words.facts
    assert ("downstream/arc: len_norm", "0.5000 ± 0.0625") in more.words.facts
    (tmp_path / EVAL / "step00000002.json").write_text("{")
    words = view.update(more.token).words
    assert any("eval/step00000002.json" in text for text in words.notes)
    again = RunView(tmp_path, "run").update()
    assert sorted(each.step for each in again.evaluations) == [1, 2]
