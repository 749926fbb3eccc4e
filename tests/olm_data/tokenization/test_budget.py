"""A run that has spent its budget of bad records stops early, and goes on with a larger one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizing import digests, make_dataset, make_request, texts, write_jsonl

from olm_data.errors import InputError
from olm_data.runners.base import Count
from olm_data.runners.local import InlineRunner, LocalRunner
from olm_data.tokenization.budget import EARLY_BAD, EARLY_RECORDS, BudgetWatch, is_lost
from olm_data.tokenization.recipe import parse_budget


class Counting(InlineRunner):
    """An inline runner that keeps the numbers of the tasks it finished."""

    def __init__(self) -> None:
        self.finished: list[int] = []

    def run(self, job: Any, tasks: Any, total: int, *, done: Any, watch: Any, note: Any) -> None:
        def noted(task: int, result: Any) -> None:
            self.finished.append(task)
            done(task, result)

        super().run(job, tasks, total, done=noted, watch=watch, note=note)


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    return [
        write_jsonl(tmp_path / f"{k}.jsonl", [*texts(30, 30 * k), *([b"bad"] * 3 * (k > 0))])
        for k in range(5)
    ]


def test_above_a_count_the_run_stops_and_a_larger_one_goes_on_from_there(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    runner, output = Counting(), tmp_path / "out"
    options: dict[str, Any] = {"shard_tokens": 500}
    tasks = len(make_request(inputs, tiny_tokenizer, **options).plan().tasks)
    with pytest.raises(InputError) as caught:
        make_dataset(inputs, tiny_tokenizer, output, runner=runner, max_bad="4", **options)
    assert 0 < len(runner.finished) < tasks
    assert "stopped early" in caught.value.what
    assert str(caught.value.where).count("malformed") == 6
    again = Counting()
    made = make_dataset(inputs, tiny_tokenizer, output, runner=again, max_bad="12", **options)
    assert sorted(runner.finished + again.finished) == list(range(tasks))
    assert made.kept_shards == len(runner.finished)
    make_dataset(inputs, tiny_tokenizer, tmp_path / "whole", max_bad="12", **options)
    assert digests(output) == digests(tmp_path / "whole")


def test_workers_are_stopped_too_and_the_ten_places_are_those_of_the_first_tasks(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*([b"bad"] * 20), *texts(4000)])
    with pytest.raises(InputError) as caught:
        make_dataset(
            [source], tiny_tokenizer, tmp_path / "out", runner=LocalRunner(1), max_bad="15"
        )
    places = str(caught.value.where).splitlines()[1:]
    assert [line.split(":")[1].strip() for line in places] == [f"byte {4 * k}" for k in range(10)]


def test_places_in_an_unfinished_task_are_found_by_reading_it_again(
    inputs: list[Path], tiny_tokenizer: Path
) -> None:
    request = make_request(inputs, tiny_tokenizer)
    plan, source = request.plan(), request.source
    watch = BudgetWatch(plan, source.inputs, source.options, parse_budget("3"), {})
    counts = np.zeros((len(plan.tasks), len(Count)), np.int64)
    counts[-1, [Count.DOCUMENTS, Count.DROPPED, Count.BAD]] = 30, 3, 3
    watch.check(counts, 0.1)
    counts[-1, [Count.DROPPED, Count.BAD]] = 4
    with pytest.raises(InputError, match=r"4 of the first 34 records are bad"):
        watch.check(counts, 0.1)


@pytest.mark.parametrize(
    ("budget", "bad", "records", "done", "lost"),
    [
        ("5", 5, 10, 0.0, False),
        ("5", 6, 10, 0.0, True),
        ("0.1%", EARLY_BAD, 2000, 0.9, False),  # too few to judge
        ("0.1%", EARLY_BAD + 1, 2000, 0.01, True),
        ("0.1%", 2000, 1_000_000, 0.9, False),  # a little above the share: the end decides
        ("0.1%", 2000, 1_000_000, 1.0, False),
        ("0.1%", 2300, 1_000_000, 0.9, True),
        ("0.1%", 2300, 1_000_000, 0.5, False),
        ("0.1%", 60_000, EARLY_RECORDS, 0.0, True),  # mostly bad, size of the rest unknown
        ("50%", 60_000, EARLY_RECORDS, 0.1, False),
        ("100%", 10**9, 10**9, 1.0, False),
    ],
)
def test_a_run_is_lost_above_a_count_or_far_above_a_share(
    budget: str, bad: int, records: int, done: float, lost: bool
) -> None:
    assert is_lost(parse_budget(budget), bad, records, done) is lost


@given(
    share=st.sampled_from(["0.1%", "1%", "10%", "50%"]),
    bad=st.integers(0, 10**6),
    rest=st.integers(0, 10**7),
    wrong=st.floats(0.5, 1),
)
def test_a_share_is_not_given_up_while_the_rest_could_save_it(
    share: str, bad: int, rest: int, wrong: float
) -> None:
    """All bad records come first; the size of the whole is guessed up to twice wrong."""
    budget, total = parse_budget(share), bad + rest
    if budget.allows(bad, total) and total:
        seen = min(max(2 * bad, 1), total)
        assert not is_lost(budget, bad, seen, min(seen / total / wrong, 1.0))
