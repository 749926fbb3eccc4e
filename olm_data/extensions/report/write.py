"""The verb behind `olm-data report`: one HTML page about what was asked, got, and trained.

    lock + datasets -> mixture.py, rows.py, lengths here --+--> sections -> one page
    run folders     -> what the ledger says, here ---------+
                    -> frozen: what `olm-train watch` shows, at one moment

Reads JSON, arrays and the run's logs; never torch, never the network but for data that lies there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.errors import OlmError
from olm_data.extensions.ledger.files import ledger_files
from olm_data.extensions.report.mixture import (
    epochs_section,
    largest,
    packing_section,
    rows_section,
    source_colour,
    stages_section,
    tree_section,
)
from olm_data.extensions.report.run_view import RunView, Update, encoded, open_views
from olm_data.extensions.report.step_documents import StepDocuments
from olm_data.extensions.show.ledger import LEARNED, summarise
from olm_data.mixture.lock import Lock
from olm_data.page import fields, joined, note, run_script, section, svg, table, write_page
from olm_data.storage.output_paths import refuse_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_SHOWN = 10
"""Documents in a table."""


def ledger_section(name: str, folder: Path) -> str:
    """Return what the ledger of a run says; "" without one.

    Raises:
        ValidationError: a file is not one that a run writes.
    """
    if not ledger_files(folder):
        return ""
    view = summarise(folder, MOST_SHOWN)
    parts = []
    if view.missing:
        parts.append(note(f"{view.missing:,} steps are not in the ledger."))
    if view.repeated:
        parts += [
            note(f"{view.repeated:,} documents were seen in two epochs or more. Never learned:"),
            fields(view.never_learned, *LEARNED),
            note("Memorised at the second epoch:"),
            fields(view.memorised, *LEARNED),
        ]
    return section(f"Loss by document of {name}", joined(parts)) if parts else ""


SAMPLE_SOURCES = 8  # each has a colour of its own
SAMPLE_SHARDS = 16  # lengths are drawn from at most this many shards a source, evenly spread


def length_section(lock: Lock, datasets: Sequence[Dataset]) -> str:
    """Return a histogram of the tokens by the length of their document, one a source."""
    lengths: dict[str, np.ndarray] = {}
    rows, partial = [], False
    for index in sorted(largest(lock, SAMPLE_SOURCES)):
        source, dataset = lock.sources[index], datasets[index]
        shards = len(dataset.manifest.shards)
        chosen = sorted({i * shards // SAMPLE_SHARDS for i in range(SAMPLE_SHARDS)})
        partial |= len(chosen) < shards
        ends = [dataset.shard(i).ends.astype(np.int64) for i in chosen]
        sample = np.concatenate([np.diff(e, prepend=0) for e in ends])
        lengths[source.name] = sample
        mean, of = dataset.tokens / dataset.documents, np.percentile(sample, [10, 50, 90])
        sizes = [f"{number:,.0f}" for number in (dataset.documents, mean, *of, sample.max())]
        longer = f"{100 * np.mean(sample > lock.sequence_length):.1f} %"
        rows.append((source.name, *sizes, longer))
    shortest = min(int(sample.min()) for sample in lengths.values())
    longest = max(int(sample.max()) for sample in lengths.values())
    bins = np.geomspace(shortest, longest + 1, 60)

    def draw(axes: Axes) -> None:
        for name, sample in lengths.items():
            colour = source_colour(lock, name)
            share, _ = np.histogram(sample, bins, weights=sample / sample.sum())
            axes.stairs(100 * share, bins, fill=True, alpha=0.35, color=colour)
            axes.stairs(100 * share, bins, color=colour, label=name)
        axes.axvline(lock.sequence_length, color="#888", linestyle=":", linewidth=1)
        axes.set_xscale("log")
        axes.set_xlabel("document length, tokens (dotted: sequence length)")
        axes.set_ylabel("share of the source's tokens, %")
        axes.legend(frameon=False)

    alt = f"Histogram of tokens by the length of their document, {shortest:,} to {longest:,} tokens"
    head = ("source", "documents", "mean", "10 %", "median", "90 %", "longest", "longer than a row")
    parts = [svg(draw, alt), table(head, rows, numbers=7)]
    if partial:
        parts.append(note(f"Of {SAMPLE_SHARDS} shards a source, evenly spread."))
    if len(lengths) < len(lock.sources):
        parts.append(note(f"Of the {len(lengths)} sources drawn most, of {len(lock.sources):,}."))
    return section("Document lengths", joined(parts))


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
    views = open_views([Path(folder) for folder in folders], lock_path)
    page = frozen(views)
    for remark in (text for run in page.runs if run.words for text in run.words.notes):
        say(remark)
    sections = [  # what a reader of a run's report looks for first
        *(ledger_section(view.name, view.folder) for view in views),
        tree_section(lock),
        stages_section(lock),
        epochs_section(lock),
        length_section(lock, datasets),
        packing_section(lock),
        rows_section(lock),
    ]
    title = f"olm report: {', '.join(view.name for view in views) or Path(lock_path).name}"
    script = run_script(data=encoded(page)) if views else None
    return write_page(output, title, _facts(lock), sections, script=script)


def _facts(lock: Lock) -> list[tuple[str, str]]:
    trained = (s.trained_share * lock.rows_drawn(i) for i, s in enumerate(lock.sources))
    share = sum(trained) / lock.total_rows
    return [
        ("sources", f"{len(lock.sources)}"),
        ("rows planned", f"{lock.total_rows:,}"),
        ("tokens planned", f"{lock.total_rows * lock.sequence_length:,}"),
        ("sequence length", f"{lock.sequence_length:,}"),
        ("packing", lock.packing.name),
        ("trained", f"{100 * share:.1f} % of tokens" if share < 1 else ""),
        ("lock", lock.digest[:12]),
    ]


def frozen(views: Sequence[RunView]) -> Frozen:
    """Return what the page of some runs holds.

    Raises:
        ValidationError: a log is malformed.
    """
    runs, documents = [], []
    for view in views:
        view.read_all()
        found = {}
        for step in view.frozen_steps(MOST_STEPS):
            with suppress(OlmError):  # the page then says what to type, and that says why
                found[step] = view.documents(step, most_rows=MOST_ROWS, most_text=MOST_TEXT)
        runs.append(view.update())
        documents.append(found)
    return Frozen(runs=runs, documents=documents)
