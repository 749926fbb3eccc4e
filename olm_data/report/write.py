"""The verb behind `olm-data report`: one HTML page about what was asked, got, and trained.

    lock + datasets -> mixture.py, stages.py, documents.py, rows.py --+--> sections -> one page
    run folder      -> run.py ----------------------------------------+

Reads JSON, arrays and the run's logs; never torch, never the network but for data that lies there.
"""

from __future__ import annotations

from pathlib import Path

from olm_data.mixture.lock import Lock
from olm_data.page import write_page
from olm_data.report.documents import length_section
from olm_data.report.mixture import epochs_section, stages_section, tree_section
from olm_data.report.rows import packing_section, rows_section
from olm_data.report.run import RunLog, sample_section, speed_section, training_section


def write_report(lock_path: str, run: str | None, output: str) -> Path:
    """Write the report of a mixture lock, and of a run of it if given.

    Args:
        lock_path: `mixture.lock.json`.
        run: save_folder of a training run, or None.
        output: path of the HTML file; replaced as a whole.

    Returns:
        The path written.

    Raises:
        InputError, ValidationError: there is no sound lock or dataset, or no run in the folder.
        UsageError: matplotlib is not installed.
    """
    lock = Lock.read(lock_path)
    datasets = lock.open_datasets()
    log = RunLog.read(Path(run)) if run else None
    sections = [tree_section(lock), stages_section(lock), epochs_section(lock)]
    sections += [
        length_section(lock, datasets),
        packing_section(lock),
        rows_section(lock),
    ]
    if log is not None:
        # what a reader of a run's report looks for first
        sections = [training_section(log), speed_section(log), sample_section(log), *sections]
    name = Path(run or lock_path).name
    return write_page(output, f"olm report: {name}", _facts(lock, log), sections)


def _facts(lock: Lock, log: RunLog | None) -> list[tuple[str, str]]:
    facts = [
        ("sources", f"{len(lock.sources)}"),
        ("rows planned", f"{lock.total_rows:,}"),
        ("tokens planned", f"{lock.total_rows * lock.sequence_length:,}"),
        ("sequence length", f"{lock.sequence_length:,}"),
        ("packing", lock.packing),
        ("lock", lock.digest[:12]),
    ]
    if log is not None and log.steps:
        facts += [("steps trained", f"{log.steps[-1]['step']:,}")]
        _, loss = log.series("train/CE loss")
        if loss:
            facts.append(("last loss", f"{loss[-1]:.3f}"))
    return facts
