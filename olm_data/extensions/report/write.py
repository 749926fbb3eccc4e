"""The verb behind `olm-data report`: one HTML page about what was asked, got, and trained.

    lock + datasets -> mixture.py, documents.py, rows.py --+--> sections -> one page
    run folders     -> training.py ------------------------+
                    -> frozen: what `olm-train watch` shows, at one moment

Reads JSON, arrays and the run's logs; never torch, never the network but for data that lies there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from olm_data.errors import OlmError
from olm_data.extensions.report.documents import length_section
from olm_data.extensions.report.ledger import ledger_section
from olm_data.extensions.report.mixture import epochs_section, stages_section, tree_section
from olm_data.extensions.report.rows import packing_section, rows_section
from olm_data.extensions.report.run_view import Update, encoded, open_views
from olm_data.extensions.report.step_documents import StepDocuments
from olm_data.extensions.report.training import (
    TrainedRun,
    headline,
    held_out_section,
    runs_section,
    sample_section,
    samples_section,
    speed_section,
    tasks_section,
)
from olm_data.mixture.lock import Lock
from olm_data.page import note, run_script, write_page
from olm_data.storage.output_paths import refuse_output

MOST_STEPS, MOST_ROWS, MOST_TEXT = 48, 4, 240
"""Steps whose documents are in the page, rows of each, characters of each piece."""


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """What a page without a server holds: for each run what is shown, and documents by step."""

    runs: list[Update]
    documents: list[dict[int, StepDocuments]]


def write_report(
    lock_path: str, folders: Sequence[str], output: str, *, say: Callable[[str], None]
) -> Path:
    """Write the report of a mixture lock, and of runs of it if given, laid over each other.

    Args:
        lock_path: `mixture.lock.json`.
        folders: save_folders of training runs, each once.
        output: path of the HTML file; replaced as a whole.
        say: takes notes for the user.

    Returns:
        The path written.

    Raises:
        InputError, ValidationError: there is no sound lock or dataset, or no run in the folder.
        UsageError: matplotlib is not installed.
    """
    refuse_output(output, "--output", "local file")
    lock = Lock.read(lock_path)
    datasets = lock.open_datasets()
    runs = [TrainedRun.read(Path(folder)) for folder in folders]
    _name_apart(runs, folders)
    for remark in (remark for run in runs for remark in run.log.notes):
        say(remark)
    sections = [tree_section(lock), stages_section(lock), epochs_section(lock)]
    sections += [
        length_section(lock, datasets),
        packing_section(lock),
        rows_section(lock),
    ]
    # what a reader of a run's report looks for first
    if runs:
        trained = [runs_section(runs), held_out_section(runs)]
        trained += [tasks_section(runs), speed_section(runs)]
        pairs = zip(runs, folders, strict=True)
        trained += [ledger_section(run.name, Path(folder)) for run, folder in pairs]
        remarks = [_other_lock(lock, run) for run in runs]
        remarks += [note(remark) for run in runs for remark in run.log.notes]
        sections = [
            *trained,
            *map(samples_section, runs),
            *map(sample_section, runs),
            *remarks,
            *sections,
        ]
    name = ", ".join(run.name for run in runs) or Path(lock_path).name
    facts = headline(runs[0]) if len(runs) == 1 else []
    data = frozen([Path(folder) for folder in folders], lock_path) if folders else ""
    script = run_script(data=data) if data else None
    title = f"olm report: {name}"
    return write_page(output, title, [*facts, *_facts(lock)], sections, script=script)


def _name_apart(runs: Sequence[TrainedRun], folders: Sequence[str]) -> None:
    """Name runs by their paths where their folders have one name."""
    names = [run.name for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if names.count(run.name) > 1:
            run.name = folder


def _other_lock(lock: Lock, run: TrainedRun) -> str:
    """Return a remark where a run was not trained on this mixture, else nothing."""
    digests = {start.lock for start in run.log.starts}
    if digests <= {lock.digest}:
        return ""
    others = ", ".join(sorted(digest[:12] for digest in digests - {lock.digest}))
    return note(f"{run.name} was also trained by another lock than this page's: {others}.")


def _facts(lock: Lock) -> list[tuple[str, str]]:
    return [
        ("sources", f"{len(lock.sources)}"),
        ("rows planned", f"{lock.total_rows:,}"),
        ("tokens planned", f"{lock.total_rows * lock.sequence_length:,}"),
        ("sequence length", f"{lock.sequence_length:,}"),
        ("packing", lock.packing.name),
        ("lock", lock.digest[:12]),
    ]


def frozen(folders: Sequence[Path], lock: str | None) -> str:
    """Return the JSON of the page of some runs; no character of it begins a tag.

    Raises:
        InputError, ValidationError: a folder is no run's, or its log is malformed.
    """
    views = open_views(folders, lock)
    runs, documents = [], []
    for view in views:
        view.read_all()
        found = {}
        for step in view.frozen_steps(MOST_STEPS):
            with suppress(OlmError):  # the page then says what to type, and that says why
                found[step] = view.documents(step, most_rows=MOST_ROWS, most_text=MOST_TEXT)
        runs.append(view.update())
        documents.append(found)
    return encoded(Frozen(runs=runs, documents=documents))
