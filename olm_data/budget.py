"""Whether the bad records of a run are few enough (`--max-bad`), judged at its end.

    accounts of all tasks -> check_budget -> nothing | InputError with the first ten places

Never: drops or counts a record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from olm_data.account import BAD_REASONS, InputAccount
from olm_data.errors import InputError, printable
from olm_data.plan import Plan
from olm_data.quarantine import FOLDER
from olm_data.tokenize_request import BadBudget

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
            where=plan.describe(0) if plan.tasks else plan.inputs[0]["path"],
            fix="check the paths; an empty dataset cannot be trained on",
        )
    if not budget.allows(bad, records):
        raise InputError(
            f"{bad:,} of {records:,} records are bad, more than --max-bad {budget} allows: "
            + ", ".join(f"{reason} {n:,}" for reason, n in sorted(reasons.items())),
            where=first_places(plan, accounts),
            why="a source with many bad records is usually read in a wrong way",
            fix=f"see them all in {output}/{FOLDER}; mend the input, or accept the loss: "
            f"--max-bad {bad} (the finished shards are kept, so this takes seconds)",
        )
    if not any(account.documents for account in accounts):
        raise InputError(
            f"none of the {records:,} records is a training document",
            where=plan.describe(0),
            fix="check --text-column and --holdout",
        )


def bad_by_reason(accounts: Iterable[InputAccount]) -> Counter[str]:
    """Return how many records were dropped as bad, by reason."""
    reasons: Counter[str] = Counter()
    for account in accounts:
        reasons.update({r: n for r, n in account.dropped.items() if r in BAD_REASONS})
    return reasons


def first_places(plan: Plan, accounts: Iterable[InputAccount]) -> str:
    """Return the first ten places of bad records, a line each, for the `where` of an error."""
    places = []
    for account in accounts:
        input = plan.inputs[account.input]
        for position, reason, detail in account.bad:
            said = f" ({detail})" if detail else ""
            places.append(f"{input['path']}: {input['position']} {position}: {reason}{said}")
    shown = "\n    ".join(printable(line) for line in places[:SHOWN])
    return f"the first of them:\n    {shown}"
