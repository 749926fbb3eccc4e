"""Whether the bad records of a run are few enough (`--max-bad`): judged early, and at its end.

    counts of running tasks -> BudgetWatch.check -> nothing | InputError with the first ten places
    accounts of all tasks   -> check_budget      -> nothing | the same

The judgement at the end is exact and the only one that lets a manifest pass. The early one saves
the work of a run that is lost: it stops at once above a count, and above a share when the rest
could hardly make up for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import msgspec
import numpy as np

from olm_data.dataset.account import (
    BAD_REASONS,
    INVALID,
    BadRecord,
    InputAccount,
    dropped_of,
    invalid_text,
    meaning,
)
from olm_data.dataset.inputs import InputFile, ReadOptions
from olm_data.dataset.plan import Plan
from olm_data.errors import InputError, printable
from olm_data.runners.base import Count
from olm_data.sources import read_units
from olm_data.tokenization.quarantine import FOLDER
from olm_data.tokenization.recipe import BadBudget
from olm_data.tokenization.task_results import TaskResult

EARLY_BAD = 1000
"""A share is not judged early on fewer bad records than this."""

EARLY_RECORDS = 100_000
"""Records after which a source that is mostly bad is given up, however large it may be."""

_CURES = {
    "filtered": "widen the condition of --where, or check the names and types of its columns",
    "excluded": "leave out --exclude-ids, or give it fewer ids",
    "unsampled": "draw a larger --sample",
    "rejected": "look at the function of --filter: it keeps too little",
    "duplicate": "nothing: the dataset holds these texts already",
    "contaminated": "look at the texts of --decontaminate, or raise --decontaminate-ngram",
    "unknown": "use a tokenizer that knows the text, or --on-unknown keep",
    "unencodable": "use a tokenizer that has ids for the text",
    "held_out": "hold out less: --holdout 0.01",
}
"""What most records are missing for -> what to do about it."""

SHOWN = 10
"""Places of bad records that an error names."""


def check_budget(
    accounts: Sequence[InputAccount], plan: Plan, budget: BadBudget, output: str
) -> None:
    """Judge a whole run.

    Args:
        accounts: of all tasks, in order.
        output: the dataset's folder, to say where the records are kept.

    Raises:
        InputError: more bad records than `budget` allows, no records, or none to train on.
    """
    records = sum(account.documents_in for account in accounts)
    reasons = bad_by_reason(accounts)
    bad = sum(reasons.values())
    if records == 0:
        raise InputError(
            "the input holds no documents",
            where=plan.describe(0) if plan.tasks else plan.inputs[0].path,
            fix="check the paths; an empty dataset cannot be trained on",
        )
    mend = "fix the input"
    if set(reasons) == {INVALID}:  # what people meet most
        mend = (
            "write text of another encoding as UTF-8 (iconv -f WINDOWS-1252 or UTF-16 -t UTF-8 "
            "OLD > NEW), and name compressed text so (.gz, .zst)"
        )
    if not budget.allows(bad, records):
        raise InputError(
            f"{bad:,} of {records:,} records are bad, more than --max-bad {budget} allows: "
            + ", ".join(f"{reason} {n:,}" for reason, n in sorted(reasons.items()))
            + first_places(plan, bad_records(accounts)),
            why="a source with many bad records is usually read in a wrong way",
            fix=f"see them all in {output}/{FOLDER}; {mend}, or accept the loss: "
            f"--max-bad {bad} (the finished shards are kept, so this takes seconds)",
        )
    if not any(account.documents for account in accounts):
        raise _nothing_left(accounts, records, plan)


def _nothing_left(accounts: Sequence[InputAccount], records: int, plan: Plan) -> InputError:
    """Say why no record became a training document, and which option is the reason."""
    left_out = dropped_of(accounts)
    counted = [f"{reason} {n:,} ({meaning(reason)})" for reason, n in left_out.most_common()]
    if held_out := sum(account.held_out for account in accounts):
        left_out["held_out"] = held_out
        counted.append(f"held out {held_out:,} (for validation)")
    (reason, _), *_ = left_out.most_common(1)
    return InputError(
        f"none of the {records:,} records is left as a training document",
        where=plan.describe(0),
        why=", ".join(counted),
        fix=_CURES.get(reason.partition(":")[0], "check --text-column"),
    )


def check_valid(accounts: Iterable[InputAccount], plan: Plan) -> None:
    """Refuse invalid text that an earlier run, with another `--on-invalid`, has dropped.

    Raises:
        InputError: there is some; names the place if it is among the first bad ones.
    """
    for account in accounts:
        if account.dropped.get(INVALID):
            input = plan.inputs[account.input]
            places = [f"{b.position}: {b.detail}" for b in account.bad if b.reason == INVALID]
            place = f", {input.position} {places[0]}" if places else ""
            raise invalid_text(printable(input.path + place))


def is_lost(budget: BadBudget, bad: int, records: int, share_done: float) -> bool:
    """Tell whether a run has too many bad records for its end to be any better.

    Args:
        bad, records: so far.
        share_done: of the whole text, estimated.

    Returns:
        for a count: whether `bad` is above it. For a share: whether more than 1,000 records are
        bad, and they are more than the budget of twice the records expected in all; or whether
        more than half of at least 100,000 records are bad and the budget is below a quarter.
    """
    if budget.share is None:
        return bad > budget.count
    if bad <= EARLY_BAD:
        return False
    mostly = records >= EARLY_RECORDS and 2 * bad > records and 4 * budget.share < 1
    return mostly or bad * share_done > 2 * budget.share * records


class BudgetWatch:
    """Stops a run that has spent its budget of bad records.

    Args:
        plan, inputs, read: what is read.
        budget: the budget.
        results: the finished tasks; the caller adds to it while the run goes on.
    """

    def __init__(
        self,
        plan: Plan,
        inputs: Sequence[InputFile],
        read: ReadOptions,
        budget: BadBudget,
        results: Mapping[int, TaskResult],
    ) -> None:
        self._plan, self._inputs, self._read, self._budget = plan, inputs, read, budget
        self._results = results
        before = [account for result in results.values() for account in result.accounts]
        self._bad_before = sum(bad_by_reason(before).values())
        self._records_before = sum(account.documents_in for account in before)

    def check(self, counts: np.ndarray, share_done: float) -> None:
        """Judge the run so far.

        Args:
            counts: as `runners.base.Watch` gets them: of the tasks of this run.
            share_done: of the text of these tasks.

        Raises:
            InputError: it is lost; finished shards stay.
        """
        if len(self._results) == len(self._plan.tasks):
            return  # the exact judgement comes next
        bad = self._bad_before + int(counts[:, Count.BAD].sum())
        now = int(counts[:, [Count.DOCUMENTS, Count.DROPPED]].sum())
        records = self._records_before + now
        if records == 0:
            return  # a task that is done may have found no record to count
        expected = self._records_before + now / share_done if share_done > 0 else math.inf
        if not is_lost(self._budget, bad, records, records / expected):
            return
        raise InputError(
            f"{bad:,} of the first {records:,} records are bad, more than --max-bad "
            f"{self._budget} allows: stopped early{first_places(self._plan, self._found(counts))}",
            why="a source with many bad records is usually read in a wrong way",
            fix="fix the input, or run it again with a larger --max-bad: "
            "the finished shards are kept",
        )

    def _found(self, counts: np.ndarray) -> Iterator[tuple[int, BadRecord]]:
        """Yield bad records with their inputs; those of unfinished tasks are read once more."""
        for task in range(len(self._plan.tasks)):
            if task in self._results:
                yield from bad_records(self._results[task].accounts)
            elif counts[task, Count.BAD]:
                yield from self._look(task)

    def _look(self, task: int) -> Iterator[tuple[int, BadRecord]]:
        # what is left out here is good records only
        read = msgspec.structs.replace(self._read, exclude=None, sample=None, filter=None)
        for batch in read_units(self._inputs, self._plan.units_of(task), read):
            for drop in batch.dropped:
                if drop.reason in BAD_REASONS:
                    yield drop.input, BadRecord(drop.position, drop.reason, drop.detail)


def bad_by_reason(accounts: Iterable[InputAccount]) -> Counter[str]:
    """Return how many records were dropped as bad, by reason."""
    reasons: Counter[str] = Counter()
    for account in accounts:
        reasons.update({r: n for r, n in account.dropped.items() if r in BAD_REASONS})
    return reasons


def bad_records(accounts: Iterable[InputAccount]) -> Iterator[tuple[int, BadRecord]]:
    """Yield the bad records that accounts name, each with its input."""
    for account in accounts:
        for bad in account.bad:
            yield account.input, bad


def first_places(plan: Plan, records: Iterable[tuple[int, BadRecord]]) -> str:
    """Return the first ten places of bad records, a line each, for the end of an error's words."""
    places = []
    for index, bad in islice(records, SHOWN):
        input, said = plan.inputs[index], f" ({bad.detail})" if bad.detail else ""
        places.append(f"{input.path}: {input.position} {bad.position}: {bad.reason}{said}")
    return "; the first of them:\n    " + "\n    ".join(map(printable, places))
