"""What pages and reports say of the evaluations of a run: held-out sets and downstream tasks.

    Evaluation, of the log or of a watcher --point--> EvaluationPoint   for curves
                                           --Standing.take--> the latest of each set and task

Texts are as they are in the log: who shows them makes them harmless.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from olm_data.run_log.log import Evaluation, Values
from olm_data.run_log.metric_names import (
    EVAL_BPB,
    EVAL_CE_LOSS,
    EVAL_QUESTIONS,
    change_of,
    group_of,
    of_group,
    primary_of,
    stderr_of,
)

MOST_FACTS = 8
"""Sets and tasks, each, whose results stand at the top of a page."""


class TaskScore(msgspec.Struct, frozen=True):
    """The primary metric of a task, with its standard error over the questions."""

    metric: str
    value: float
    error: float | None


class EvaluationPoint(msgspec.Struct, frozen=True):
    """An evaluation after a step.

    Attributes:
        losses: nats a token by held-out set.
        bits: bits per byte by held-out set.
        scores: by task.
    """

    step: int
    losses: dict[str, float]
    bits: dict[str, float]
    scores: dict[str, TaskScore]


class SetRow(msgspec.Struct, frozen=True):
    """The latest losses of a held-out set, or of a group of its labels ("" is all of them)."""

    name: str
    group: str
    step: int
    loss: float
    bits: float | None


class TaskRow(msgspec.Struct, frozen=True):
    """The latest scores of a task; `change` is to the evaluation before, question by question."""

    name: str
    step: int
    score: TaskScore
    change: TaskScore | None
    bits: float | None
    questions: int


def point(entry: Evaluation) -> EvaluationPoint:
    """Return what curves show of an evaluation."""
    losses, bits, scores = dict[str, float](), dict[str, float](), dict[str, TaskScore]()
    for name, values in entry.results.items():
        if (score := _score(values)) is not None:
            scores[name] = score
            continue
        loss, of_text = values.get(EVAL_CE_LOSS), values.get(EVAL_BPB)
        if loss is not None:  # none: a set without a token, or a loss that overflowed
            losses[name] = loss
        if of_text is not None:
            bits[name] = of_text
    return EvaluationPoint(entry.step, losses, bits, scores)


class EvaluationTable:
    """The latest evaluation of each set and task.

    Args:
        entries: evaluations, see `take`.
    """

    def __init__(self, entries: Iterable[Evaluation] = ()) -> None:
        self._latest: dict[str, tuple[int, Values]] = {}
        for entry in entries:
            self.take(entry)

    def take(self, entry: Evaluation) -> None:
        """Take an evaluation; one of an earlier step than is known says nothing new."""
        for name, values in entry.results.items():
            if name not in self._latest or self._latest[name][0] <= entry.step:
                self._latest[name] = (entry.step, values)

    def sets(self) -> list[SetRow]:
        """Return held-out sets, each followed by its groups."""
        rows = []
        for name, (step, values) in self._latest.items():
            loss = values.get(EVAL_CE_LOSS)
            if loss is None:
                continue
            rows.append(SetRow(name, "", step, loss, values.get(EVAL_BPB)))
            for metric, value in values.items():
                of = group_of(metric)
                if of is not None and of[0] == EVAL_CE_LOSS and value is not None:
                    bits = values.get(of_group(EVAL_BPB, *of[1:]))
                    rows.append(SetRow(name, f"{of[1]} {of[2]}", step, value, bits))
        return rows

    def tasks(self) -> list[TaskRow]:
        """Return downstream tasks."""
        rows = []
        for name, (step, values) in self._latest.items():
            score = _score(values)
            if score is None:
                continue
            change = change_of(score.metric)
            mean = values.get(change)
            changed = (
                None if mean is None else TaskScore(change, mean, values.get(stderr_of(change)))
            )
            questions = int(values.get(EVAL_QUESTIONS) or 0)
            rows.append(TaskRow(name, step, score, changed, values.get(EVAL_BPB), questions))
        return rows

    def facts(self) -> list[tuple[str, str]]:
        """Return (name, value) of the first sets and tasks, for the top of a page."""
        sets = [each for each in self.sets() if not each.group][:MOST_FACTS]
        tasks = self.tasks()[:MOST_FACTS]
        return [
            *((f"loss on {each.name}", f"{each.loss:.3f}") for each in sets),
            *((f"bits/byte on {e.name}", f"{e.bits:.3f}") for e in sets if e.bits is not None),
            *((f"{each.name}: {each.score.metric}", plus_minus(each.score)) for each in tasks),
        ]


def _score(values: Values) -> TaskScore | None:
    metric = primary_of(values)
    if metric is None or (value := values[metric]) is None:
        return None
    return TaskScore(metric, value, values.get(stderr_of(metric)))


def plus_minus(score: TaskScore, sign: str = "") -> str:
    """Return `0.4123 ± 0.0201`; without an error where none is known."""
    error = "" if score.error is None else f" ± {score.error:.4f}"
    return f"{score.value:{sign}.4f}{error}"
