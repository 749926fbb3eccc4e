"""Scores of a task question by question, beside the log of a run: what differences are made of.

    RUN/evaluations/NAME/step00000100.json     one for each evaluation, written whole

Only the primary metric is kept. Never: a mean; those are in `metrics.jsonl`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from olm_data.bounded_json import MalformedJson, Size, decode
from olm_data.errors import ValidationError, printable
from olm_data.regular_files import read_regular
from olm_data.storage.store import Store

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
