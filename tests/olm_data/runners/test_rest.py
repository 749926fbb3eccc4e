"""A worker begins its next task while the one before it is made durable; deaths lose neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.jobs import Durable

from olm_data.errors import InputError, ResourceError
from olm_data.runners.local import LocalRunner


def run(runner: Any, job: Durable, tasks: list[int]) -> tuple[dict[int, int], list[str]]:
    results: dict[int, int] = {}
    notes: list[str] = []

    def done(task: int, result: int) -> None:
        assert task not in results
        results[task] = result

    runner.run(
        job, tasks, len(tasks), done=done, watch=lambda counts, running: None, note=notes.append
    )
    return results, notes


def test_the_next_task_begins_before_the_last_one_is_finished(tmp_path: Path) -> None:
    results, notes = run(LocalRunner(1), Durable(str(tmp_path), last=3), [0, 1, 2, 3])
    assert (results, notes) == ({0: 0, 1: 1, 2: 4, 3: 9}, [])


def test_a_death_costs_both_tasks_of_the_worker_and_is_laid_to_the_one_at_work(
    tmp_path: Path,
) -> None:
    results, notes = run(LocalRunner(1), Durable(str(tmp_path), last=1, dies=1), [0, 1, 2, 3])
    assert results == {0: 0, 1: 1, 2: 4, 3: 9}
    assert len(notes) == 1
    assert "SIGKILL" in notes[0]
    assert "input-2.jsonl" in notes[0]


def test_a_task_that_always_kills_its_worker_is_named_and_the_one_before_it_is_kept(
    tmp_path: Path,
) -> None:
    results: dict[int, int] = {}
    with pytest.raises(ResourceError, match="3 times") as caught:
        LocalRunner(1).run(
            Durable(str(tmp_path), last=1, dies=99),
            [0, 1, 2, 3],
            4,
            done=results.__setitem__,
            watch=lambda counts, running: None,
            note=lambda text: None,
        )
    assert caught.value.where == "input-2.jsonl"
    assert "SIGKILL" in caught.value.what
    assert "memory" in str(caught.value)
    assert results == {0: 0, 1: 1}  # tried again, it was alone with its worker


def test_an_error_while_a_task_is_made_durable_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="disk is gone") as caught:
        run(LocalRunner(1), Durable(str(tmp_path), last=3, fails=1), [0, 1, 2, 3])
    assert caught.value.where == "input-1.jsonl"
