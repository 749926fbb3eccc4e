"""Where text comes from: files of every format, local or remote, hub datasets, the Python library.

    resolve_source(["books/*.jsonl.zst"]) | resolve_source(source="fineweb-edu") -> SourcePlan
    plan_units(index, input, options, target_bytes) -> [Unit]
    read_units(inputs, units, options)              -> DocumentBatch, ...
    current_revision(input)                         -> compare with input.revision: has it changed?

Each format is one module with `units` and `read`; nothing outside this package knows formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType

from olm_data.dataset.inputs import InputFile, ReadOptions, Unit
from olm_data.select.selection import IdSet
from olm_data.sources import arrow, csv_table, hub, json_array, jsonl, parquet, txt
from olm_data.sources.base import DocumentBatch, Drop, SourcePlan
from olm_data.sources.buffers import merge
from olm_data.sources.files import current_revision
from olm_data.sources.resolve import resolve_source
from olm_data.sources.selected import chosen

__all__ = [
    "DocumentBatch",
    "Drop",
    "SourcePlan",
    "current_revision",
    "plan_units",
    "read_units",
    "resolve_source",
]

_MODULES: dict[str, ModuleType] = {
    "jsonl": jsonl,
    "json": json_array,
    "csv": csv_table,
    "parquet": parquet,
    "arrow": arrow,
    "txt": txt,
    "hub": hub,
}


def plan_units(index: int, input: InputFile, options: ReadOptions, target_bytes: int) -> list[Unit]:
    """Cut one input into units of about `target_bytes` of text, by its layout alone.

    Args:
        index: index of the input in the plan's list.

    Returns:
        units in reading order that cover the input; none for an empty file.

    Raises:
        InputError: the file is damaged, or has no such text column (where the format can tell).
        StorageError: remote storage fails.
    """
    units: list[Unit] = _MODULES[input.format].units(index, input, options, target_bytes)
    return units


def read_units(
    inputs: Sequence[InputFile],
    units: Sequence[Unit],
    options: ReadOptions,
    excluded: IdSet | None = None,
) -> Iterator[DocumentBatch]:
    """Yield the chosen documents of units, in their order; batches of small files are joined.

    Each record of the input is in exactly one batch: as a document, in `dropped`, or counted in
    `skipped`.

    Args:
        excluded: ids to leave out, the set whose digest is `options.exclude`.

    Raises:
        InputError: a file is damaged, or has no such text column.
        StorageError: remote storage fails.
    """

    def each() -> Iterator[DocumentBatch]:
        for unit in units:
            input = inputs[unit.input]
            # map, as the variable of a loop would keep a batch while the consumer works on it
            yield from map(choose, _MODULES[input.format].read(input, unit, options))

    def choose(batch: DocumentBatch) -> DocumentBatch:
        return chosen(batch, options, excluded)

    return merge(each(), options.batch_bytes)
