"""Downstream tasks in a run: eval sets of `olm-data eval-set build`, scored by the rules of OLMES.

    RUN/metrics.jsonl         means, standard errors, differences to the evaluation before
    RUN/evaluations/NAME/     the primary metric question by question, which those are made of

What scores is `olm_train.extensions.downstream.tasks`, here and in `olm-train evaluate`.

Scores of a task question by question, beside the log of a run: what differences are made of.

    RUN/evaluations/NAME/step00000100.json     one for each evaluation, written whole

Only the primary metric is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
import numpy as np

from olm_data.bounded_json import MalformedJson, Size, decode
from olm_data.config.hints import FilePath
from olm_data.errors import ValidationError, printable
from olm_data.regular_files import read_regular
from olm_data.run_log.metric_names import EVAL_TASK
from olm_data.storage.store import Store
from olm_train.callbacks.evaluations import Evaluations
from olm_train.data.base import require_lock
from olm_train.evaluation.scoring import Float64, TaskScores, change
from olm_train.extensions.downstream.tasks import TaskRequests, open_task

FOLDER = "evaluations"
_FILE = re.compile(r"step(\d{8,})\.json")


class QuestionScores(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scores of an evaluation.

    Attributes:
        digest: of the eval set.
        metric: which one.
        step: steps done before the evaluation.
        values: of each question; None where it does not count.
    """

    digest: str
    metric: str
    step: Size
    values: tuple[float | None, ...]
    version: Literal[1] = 1

    @classmethod
    def of(cls, scores: TaskScores, step: int) -> QuestionScores:
        """Return the scores of a task after `step` as they are kept."""
        values = scores.values[scores.primary].tolist()
        kept = tuple(None if value != value else value for value in values)
        return cls(digest=scores.digest, metric=scores.primary, step=step, values=kept)

    def write(self, run: Path, name: str) -> None:
        """Write them for the task of a name, whole; a file of the same step is replaced."""
        file = f"step{self.step:08}.json"
        Store(str(run / FOLDER / name)).put(file, msgspec.json.encode(self) + b"\n")


def last_scores(run: Path, name: str, before: int | None = None) -> QuestionScores | None:
    """Return the latest scores of a task; None: there are none.

    Args:
        before: step that they must be earlier than.

    Raises:
        ValidationError: the file is damaged.
    """
    folder = run / FOLDER / name
    found = [match for path in folder.glob("step*.json") if (match := _FILE.fullmatch(path.name))]
    steps = {int(match[1]): match[0] for match in found}
    known = [step for step in steps if before is None or step < before]
    if not known:
        return None
    path = folder / steps[max(known)]
    try:
        return decode(read_regular(path), QuestionScores)
    except MalformedJson as error:
        raise ValidationError(
            f"the scores are damaged: {printable(str(error))}",
            where=str(path),
            fix="delete the file: it is only compared with",
        ) from None


NEEDS = "the callback downstream_evaluator"


@dataclass(kw_only=True)
class DownstreamEvaluatorCallback(Evaluations):
    """Scores downstream tasks.

    Attributes:
        enabled: evaluate, where `downstream_evaluator` is given at all.
        eval_interval: steps between evaluations.
        fixed_steps: further steps after which to evaluate.
        eval_on_startup: also before the first step.
        eval_on_finish: also after the last step.
        cancel_after_first_eval: end the run after the first evaluation, see `trainer.on_cancel`.
        tasks: eval sets of the mixture's tokenizer: folder of each by the name it gets in the logs,
            behind `downstream/`.
    """

    called: ClassVar[str] = "downstream_evaluator"

    tasks: dict[str, FilePath]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tasks: dict[str, TaskRequests] = {}
        self._scores: dict[str, TaskScores] = {}

    def folders(self) -> dict[str, str]:
        return {f"{EVAL_TASK}{name}": folder for name, folder in self.tasks.items()}

    def digest(self, name: str, folder: str) -> str:
        if name in self._tasks:
            return self._tasks[name].eval_set.info.digest
        return open_task(name, folder, require_lock(self.trainer.data_loader, NEEDS)).info.digest

    def pre_train(self) -> None:
        trainer, lock = self.trainer, require_lock(self.trainer.data_loader, NEEDS)
        size = getattr(trainer.data_loader, "rank_microbatch_size", lock.sequence_length)
        for name, folder in self.folders().items():
            task = TaskRequests(
                open_task(name, folder, lock), lock.sequence_length, size, world=trainer.world
            )
            self._tasks[name] = task
            if task.truncated:
                trainer.say(
                    f"note: {task.truncated:,} of {task.eval_set.info.requests:,} requests of "
                    f"{name} are longer than a row of {lock.sequence_length:,} tokens: their "
                    "contexts lose their beginning"
                )

    def measure(self, name: str, stop: Callable[[], bool] | None) -> dict[str, float] | None:
        module, trainer = self.trainer.train_module, self.trainer
        by_label = partial(module.eval_losses, fp32_logits=True)
        scores = self._tasks[name].measure(by_label, stop=stop)
        if scores is None:
            return None
        self._scores[name] = scores
        folder, step = trainer.work_dir, trainer.step
        before = trainer.world.on_main(lambda: last_scores(folder, name, before=step))
        results, metric = scores.metrics(), scores.primary
        values = None if before is None else comparable(before, scores)
        if values is not None:
            results |= change(scores.values[metric], values).metrics(metric)
        return results

    def keep(self, names: Sequence[str]) -> None:
        trainer = self.trainer

        def write() -> None:
            for name in names:
                QuestionScores.of(self._scores[name], trainer.step).write(trainer.work_dir, name)

        trainer.world.on_main(write)


def comparable(found: QuestionScores, scores: TaskScores) -> Float64 | None:
    """Return values of an evaluation, NaN where none; None: other questions or another metric."""
    if (found.digest, found.metric) != (scores.digest, scores.primary):
        return None
    return np.array([np.nan if v is None else v for v in found.values])
