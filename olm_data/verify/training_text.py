"""What `verify RUN` shows people: a table, then what happened to the run, then what differs."""

from __future__ import annotations

from rich.console import Console

from olm_data.tables import table
from olm_data.verify.training import MOST_SHOWN, TrainingReport

HEAD = ("stage", "source", "epoch", "planned", "due so far", "skipped", "trained", "difference")


def print_training(found: TrainingReport, console: Console) -> None:
    """Print a report; numbers in the table are rows."""
    title = f"rows of {found.sequence_length:,} tokens, planned and trained"
    accounts = table(HEAD, names=2, title=title)
    stage = found.accounts[0].stage
    for account in found.accounts:
        if account.stage != stage:
            accounts.add_section()
        stage = account.stage
        numbers = (account.planned, account.due, account.skipped, account.trained)
        accounts.add_row(
            account.stage,
            account.source,
            str(account.epoch),
            *(f"{number:,}" for number in numbers),
            f"{account.difference:+,}" if account.difference else "0",
        )
    accounts.add_section()
    totals = [
        sum(getattr(account, name) for account in found.accounts)
        for name in ("planned", "due", "skipped", "trained", "difference")
    ]
    shown = [f"{number:,}" for number in totals[:-1]]
    accounts.add_row("total", "", "", *shown, f"{totals[-1]:+,}" if totals[-1] else "0")
    console.print(accounts)
    starts, rewound = len(found.starts), found.rewound
    lines = [
        f"{found.steps:,} steps, {found.tokens:,} tokens, {starts:,} start{'s' * (starts > 1)}"
    ]
    if rewound:
        lines.append(
            f"{rewound:,} steps were trained again: a kill or a rewind had lost their weights, and "
            "they count once"
        )
    if found.not_taken:
        steps = ", ".join(f"{step:,}" for step in found.not_taken[:MOST_SHOWN])
        more = ", ..." if len(found.not_taken) > MOST_SHOWN else ""
        lines.append(
            f"{len(found.not_taken):,} steps left the weights as they were: loss or gradient was a "
            f"spike or no number (step {steps}{more}); their rows count as skipped"
        )
    lines += [
        f"step {start.step + 1:,}: went back and left out rows "
        f"{', '.join(f'[{a:,}, {b:,})' for a, b in start.bad)}: non-finite loss or gradient"
        for start in found.starts
        if start.bad
    ]
    lines += [f"skipped: rows [{a:,}, {b:,})" for a, b in found.skipped]
    lines += [f"differs: {problem}" for problem in found.problems]
    if found.agrees:
        lines.append(
            f"agrees: steps 1 to {found.steps:,}, rows 0 to {found.reached:,}: each row due was "
            "trained once, in the order of the lock, or skipped"
        )
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
