"""The verb behind `olm-data mix`: compile a manifest, write its lock, and say what was planned.

    manifest.yaml -> mixture.compile_lock -> Lock -> NAME.lock.json
                                               |---> plan(lock): numbers, warnings -> tables | JSON

The plan is computed from the lock alone, so it says what training will do, not what was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.view import View
from olm_data.errors import UsageError, printable
from olm_data.mixture.compile import PackedSource, compile_lock, open_sources, read_mixture
from olm_data.mixture.extend import extend
from olm_data.mixture.lock import Lock, split
from olm_data.mixture.manifest import Mixture
from olm_data.mixture.manifest_stages import manifest_stages
from olm_data.mixture.views import open_views
from olm_data.order.slots import TOLERANCE
from olm_data.packing.row_plan import PlanInfo
from olm_data.packing.write_plan import write_plan
from olm_data.storage.disk import io_errors, make_folder
from olm_data.storage.places import refuse_no_file
from olm_data.storage.scratch import abandoned, scratch
from olm_data.storage.store import Store, is_remote

EPOCHS_TO_WARN = 4
MANIFESTS = (".yaml", ".yml")


@dataclass(frozen=True)
class MixResult:
    """What `mix` did: the lock, where it is (or would be), and written | unchanged | dry run."""

    lock: Lock
    path: str
    status: str


def mix(
    manifest: str, output: str | None = None, *, dry_run: bool = False, overwrite: bool = False
) -> MixResult:
    """Compile `manifest` and write the lock to `output` (default: NAME.lock.json beside it).

    Raises:
        UsageError, InputError, ValidationError: the manifest or its data are refused.
        ConflictError: another lock is at `output` and `overwrite` is not set.
    """
    if output is not None:
        refuse_no_file(output, "--output")
    path = output or os.path.splitext(manifest)[0] + ".lock.json"
    if not path.endswith(".json"):
        raise UsageError(
            "the output must be a .json file", where=path, fix=f"--output {path}.lock.json"
        )
    folder = split(path)[0]
    mixture = read_mixture(manifest)
    datasets = open_sources(mixture)
    views = open_views(mixture)
    planned = list(datasets) if mixture.packing.planned else list(views)
    with _staging(folder, here=not dry_run) if planned else nullcontext(Path()) as staging:
        packed = {
            name: pack_source(name, mixture, datasets[name], views.get(name), staging / name)
            for name in planned
        }
        lock = compile_lock(mixture, datasets, folder, packed)
        if dry_run:
            return MixResult(lock, path, "dry run")
        for name, source in packed.items():  # before the lock that needs them
            publish_plan(source.plan, staging / name, Store(folder))
    return MixResult(lock, path, lock.write(path, overwrite=overwrite))


def pack_source(
    name: str, mixture: Mixture, dataset: Dataset, view: View | None, folder: Path
) -> PackedSource:
    """Write the row plan of a source into a new local folder.

    Raises:
        InputError: its view keeps no document.
    """
    folder.mkdir()
    scan = None if view is None else view.over(dataset)
    plan = write_plan(dataset, mixture.packing, mixture.sequence_length, folder, scan)
    if scan is None:
        return PackedSource(plan)
    scan.refuse_nothing(f"source {name!r}")
    return PackedSource(plan, scan.info())


def publish_plan(plan: PlanInfo, folder: Path, beside: Store) -> None:
    """Publish the files of a row plan where a lock in `beside` looks for them, if not there yet."""
    store = beside.child(plan.folder)
    for file, sha256 in plan.sha256.items():
        if store.size(file) != (folder / file).stat().st_size or store.sha256(file) != sha256:
            store.publish(file, folder / file, sha256)


@contextmanager
def _staging(folder: str, *, here: bool) -> Iterator[Path]:
    """Yield a folder for unfinished row plans; what killed runs left is removed first.

    Args:
        folder: of the lock.
        here: the plans will be renamed into `folder`, if it is a local one.
    """
    parent = None
    if here and not is_remote(folder):
        parent = Path(Store(folder).root)
        with io_errors(folder, writing=True):
            make_folder(str(parent))
            abandoned(parent, remove=True)
    abandoned(remove=True)
    with io_errors(folder, writing=True), scratch(parent) as staging:
        yield staging


def lengthen(
    path: str, tokens: int, output: str | None, *, dry_run: bool = False, overwrite: bool = False
) -> MixResult:
    """Write a lock that goes on where the one at `path` ends, `tokens` tokens further.

    Args:
        path: a lock, or a manifest beside its lock.
        output: in the same folder (default: NAME-longer.lock.json).

    Raises:
        UsageError: the lock cannot go on so far, or `output` is in another folder.
        InputError, ValidationError: there is no lock, or it was changed.
        ConflictError: another lock is at `output` and `overwrite` is not set.
    """
    name, ending = os.path.splitext(path)
    older = name + ".lock.json" if ending in MANIFESTS else path
    lock = extend(Lock.read(older), tokens, older)
    if output is not None:
        refuse_no_file(output, "--output")
    output = output or older.removesuffix(".json").removesuffix(".lock") + "-longer.lock.json"
    if split(output)[0] != lock.folder or not output.endswith(".json"):
        raise UsageError(
            "the longer lock must be a .json file beside the older one",
            where=output,
            why="it shares its row plans and relative locations",
            fix=f"--output {os.path.splitext(older)[0]}-longer.json",
        )
    if dry_run:
        return MixResult(lock, output, "dry run")
    return MixResult(lock, output, lock.write(output, overwrite=overwrite))


def compiled(path: str) -> Lock:
    """Return the lock at `path`, or that of the manifest there, compiled without being written."""
    if os.path.splitext(path)[1] in MANIFESTS:
        return mix(path, dry_run=True).lock
    return Lock.read(path)


def plan(lock: Lock) -> dict[str, Any]:
    """Return the numbers of a lock for people and scripts (shares and epochs as floats)."""
    length = lock.sequence_length
    stages = []
    for stage in manifest_stages(lock):
        drawn = []
        for index, source in enumerate(lock.sources):
            wanted = stage.wanted[index]
            if not wanted:
                continue
            rows = stage.rows_by_source[index]
            drawn.append(
                {
                    "source": source.name,
                    "rows": rows,
                    "tokens": rows * length,
                    "epochs": rows / source.rows,
                    "share_wanted": float(wanted),
                    "share_got": rows / stage.rows,
                    "compile_error": float((stage.compiled(index) - wanted) / wanted),
                    "capped": source.name in stage.parts[0].capped,
                }
            )
        stages.append(
            {
                "name": stage.name,
                "rows": stage.rows,
                "tokens": stage.tokens,
                "sequence_length": stage.parts[0].sequence_length or length,
                "block": stage.parts[0].block,
                "parts": [part.rows for part in stage.parts],
                "sources": drawn,
            }
        )
    sources = []
    for index, source in enumerate(lock.sources):
        rows = sum(stage.rows_by_source[index] for stage in lock.stages)
        sources.append(
            {
                "source": source.name,
                "tokens_available": source.tokens_kept,
                "rows_available": source.rows,
                "tokens_in_no_row": source.tokens_in_no_row(length),
                "padding": source.padding(length),
                "rows": rows,
                "tokens": rows * length,
                "epochs": rows / source.rows,
                "max_epochs": float(Fraction(source.max_epochs)),
                "share_got": rows / lock.total_rows,
                "view": None
                if source.view is None
                else {"of_documents": source.documents, **msgspec.to_builtins(source.view)},
            }
        )
    return {
        "digest": lock.digest,
        "seed": lock.seed,
        "sequence_length": length,
        "rows": lock.total_rows,
        "tokens": lock.total_rows * length,
        "order": lock.order.name,
        "stages": stages,
        "sources": sources,
        "warnings": warnings(lock),
    }


def warnings(lock: Lock) -> list[str]:
    """Return what a user may not expect from this lock, one sentence each."""
    found = []
    for index, source in enumerate(lock.sources):
        rows = sum(stage.rows_by_source[index] for stage in lock.stages)
        if rows > EPOCHS_TO_WARN * source.rows:
            found.append(
                f"source {source.name!r} is repeated {rows / source.rows:.2f} times; "
                f"above {EPOCHS_TO_WARN} epochs repeated data helps little"
            )
        if not any(Fraction(stage.wanted[index]) for stage in lock.stages):
            found.append(f"source {source.name!r} has a weight in no stage: it is never drawn")
        if source.view is not None and source.view.ids_shared:
            found.append(
                f"ids of source {source.name!r} are not unique: the ids to exclude stand for "
                f"{source.view.ids_shared:,} more documents than ids, all left out"
            )
        if source.view is not None and source.view.ids_unmatched:
            found.append(
                f"source {source.name!r}: {source.view.ids_unmatched:,} of the "
                f"{source.view.ids:,} ids to exclude match no document"
            )
    for stage in manifest_stages(lock):
        errors = []
        for index, source in enumerate(lock.sources):
            wanted = stage.wanted[index]
            if wanted and not stage.rows_by_source[index]:
                found.append(
                    f"source {source.name!r} is never drawn in stage {stage.name!r}: its share "
                    f"of {float(wanted):.3g} is {float(wanted * stage.rows):.3g} of "
                    f"{stage.rows:,} rows"
                )
            elif wanted:
                errors.append(abs(stage.compiled(index) - wanted) / wanted)
            if source.name in stage.parts[0].capped:
                found.append(
                    f"source {source.name!r} is capped in stage {stage.name!r}: "
                    f"{float(wanted):.2%} was wanted, {stage.rows_by_source[index]:,} of "
                    f"{stage.rows:,} rows ({stage.rows_by_source[index] / stage.rows:.2%}) is what "
                    "max_epochs leaves; the others took over"
                )
        if not stage.exact and errors and max(errors) >= TOLERANCE:
            found.append(
                f"stage {stage.name!r}: the shares fit no block of {stage.parts[0].block:,} rows "
                "exactly; "
                f"the largest relative error is {float(max(errors)):.2%}"
            )
    return found + _remote_warnings(lock)


def _remote_warnings(lock: Lock) -> list[str]:
    """Say what a run has to fetch of each remote source, and when that is all of it."""
    found = []
    for index, source in enumerate(lock.sources):
        if not is_remote(lock.locations[source.name]) or not any(
            stage.rows_by_source[index] for stage in lock.stages
        ):
            continue
        size = np.dtype(source.dtype).itemsize
        warning = lock.order.cache_warning(
            index, source.rows, lock.sequence_length * size, source.tokens * size
        )
        if warning is not None:
            found.append(f"source {source.name!r} is remote and {warning}")
    return found


def print_plan(lock: Lock, console: Console) -> None:
    """Print the plan as tables, one a stage and one for the whole run."""
    numbers = plan(lock)
    for stage in numbers["stages"]:
        length = stage["sequence_length"]
        parts = numbers["sequence_length"] // length
        cut = f", each trained as {parts:,} of {length:,} tokens" if parts > 1 else ""
        table = _table(
            f"stage {stage['name']}: {stage['tokens']:,} tokens, {stage['rows']:,} rows{cut}",
            ("rows drawn", "tokens drawn", "epochs", "share wanted", "share got", "compile error"),
        )
        for row in stage["sources"]:
            table.add_row(
                row["source"],
                f"{row['rows']:,}",
                f"{row['tokens']:,}",
                f"{row['epochs']:.4f}",
                f"{row['share_wanted']:.4%}",
                f"{row['share_got']:.4%}",
                ("capped " if row["capped"] else "")
                + (f"{row['compile_error']:+.4%}" if row["compile_error"] else "0"),
            )
        console.print(table)
    table = _table(
        f"run: {numbers['tokens']:,} tokens, {numbers['rows']:,} rows of "
        f"{numbers['sequence_length']:,} tokens, seed {numbers['seed']}, order {numbers['order']}",
        (
            "tokens available",
            "in no row",
            "padding",
            "rows drawn",
            "tokens drawn",
            "epochs",
            "max",
            "share",
        ),
    )
    for row in numbers["sources"]:
        table.add_row(
            row["source"],
            f"{row['tokens_available']:,}",
            f"{row['tokens_in_no_row']:,}",
            f"{row['padding']:.4%}" if row["padding"] else "0",
            f"{row['rows']:,}",
            f"{row['tokens']:,}",
            f"{row['epochs']:.4f}",
            f"{row['max_epochs']:g}",
            f"{row['share_got']:.4%}",
        )

    def total(key: str) -> str:
        return f"{sum(row[key] for row in numbers['sources']):,}"

    table.add_section()
    table.add_row(
        "total",
        *(total("tokens_available"), total("tokens_in_no_row"), ""),
        *(total("rows"), total("tokens"), "", "", "100%"),
    )
    console.print(table)
    for line in view_lines(lock):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def view_lines(lock: Lock) -> list[str]:
    """Return what each view kept and left out, a line a source that has one."""
    lines = []
    for source in lock.sources:
        if (view := source.view) is None:
            continue
        line = (
            f"source {source.name}: {view.documents:,} of {source.documents:,} documents kept, "
            f"{view.tokens:,} of {source.tokens:,} tokens"
        )
        if view.where is not None:
            line += f"; {view.left_by_where:,} left out by where: {printable(view.where)}"
        if view.exclude_ids is not None:
            line += (
                f"; {view.left_by_ids:,} left out by exclude_ids, of whose {view.ids:,} ids "
                f"{view.ids_unmatched:,} matched nothing"
            )
        lines.append(line)
    return lines


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("source", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table
