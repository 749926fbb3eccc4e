"""Filters of one's own, by import path: `my_lab.filters:keep` says which records stay.

    path --find_filter--> OwnFilter(path, sha256 of its module's source), part of the plan
    batch --passed--> the records it keeps; the others counted as `rejected`, by its reason

The function is given a record as a mapping: the text, the id and the kept columns, by their names.
It returns True to keep it, False, or a text that says why not. Only its module's source is
compared; what that imports is not looked at.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from olm_data.config.import_path import load_object
from olm_data.dataset.account import REJECTED
from olm_data.dataset.inputs import InputFile, OwnFilter, ReadOptions
from olm_data.errors import InputError, UsageError, ValidationError, printable, quoted
from olm_data.sources.base import DocumentBatch
from olm_data.sources.buffers import choose
from olm_data.sources.rows import running

MOST_REASONS = 100
"""Reasons among the records of a batch: they are kinds, and each is a line of the account."""

MOST_LETTERS = 80


def find_filter(path: str) -> OwnFilter:
    """Return what a plan records of a filter.

    Raises:
        UsageError: there is no such function, or its module has no source.
    """
    function = load_object(path, "function", where=f"--filter {path}")
    if not callable(function):
        raise UsageError(f"{path} is no function", where=f"--filter {path}")
    try:
        source = inspect.getsource(sys.modules[path.partition(":")[0]])
    except (OSError, TypeError) as error:
        raise UsageError(
            "the module of the filter has no source in Python",
            where=f"--filter {path}",
            why="its digest tells a run that goes on whether the filter is the same",
            fix="call it from a function in a module of yours",
        ) from error
    return OwnFilter(path, hashlib.sha256(source.encode()).hexdigest())


def passed(batch: DocumentBatch, inputs: Sequence[InputFile], read: ReadOptions) -> DocumentBatch:
    """Return a batch with the records that the filter of `read` keeps.

    Raises:
        InputError: the filter fails, or returns something else.
        ValidationError: its source is not that of the plan.
    """
    assert read.filter is not None
    keep = _function(read.filter)
    what = f"the filter {read.filter.path}"
    reasons = np.empty(batch.documents, object)
    for k, record in enumerate(_records(batch, read)):
        input = inputs[int(batch.inputs[k])]
        where = f"{input.path}, {input.position} {int(batch.positions[k])}"
        with running(what, where):
            reasons[k] = _reason(keep(record), what, where)
    found = dict.fromkeys(reason for reason in reasons if reason)
    if len(found) > MOST_REASONS:
        raise InputError(
            f"{what} gives more than {MOST_REASONS} reasons",
            where=inputs[int(batch.inputs[0])].path,
            why=f"each is counted by itself, such as {quoted(next(iter(found)))}",
            fix="return the kind of the reason, without the numbers of a record",
        )
    for reason in found:
        kept = reasons != reason
        batch, reasons = choose(batch, kept, reason), reasons[kept]
    return batch


def _records(batch: DocumentBatch, read: ReadOptions) -> Iterator[dict[str, Any]]:
    kept = [{}] * batch.documents if batch.keep is None else batch.keep.to_pylist()
    ids = [None] * batch.documents if batch.ids is None else batch.ids.to_pylist()
    for k, (id, columns) in enumerate(zip(ids, kept, strict=True)):
        yield {read.id_column or "id": id, **columns, read.text_column: batch.text(k)}


def _reason(said: object, what: str, where: str) -> str | None:
    if isinstance(said, bool | np.bool_):
        return None if said else REJECTED
    if isinstance(said, str) and said:
        return f"{REJECTED}: {printable(said[:MOST_LETTERS])}"
    raise InputError(
        f"{what} returns {quoted(said)}",
        where=where,
        fix="return True to keep the record, False, or a text that says why not",
    )


@lru_cache(maxsize=8)
def _function(filter: OwnFilter) -> Callable[[dict[str, Any]], object]:
    if find_filter(filter.path) != filter:
        raise ValidationError(
            "the module of the filter has another source here than the run began with",
            where=f"--filter {filter.path}",
            fix="install the same one everywhere, or begin a new output",
        )
    found: Callable[[dict[str, Any]], object] = load_object(
        filter.path, "function", where=f"--filter {filter.path}"
    )
    return found
