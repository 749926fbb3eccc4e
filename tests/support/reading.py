"""Reads a source whole, as tests want it: one record a document, and the drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from olm_data.config.convert import parse
from olm_data.config.values import Values
from olm_data.sources import SourcePlan, SourceRequest, plan_units, read_units
from olm_data.sources import resolve_source as _resolve_source
from olm_data.sources.base import Drop


@dataclass
class Read:
    """What came out of a source.

    Attributes:
        texts, ids, places: of each document; a place is (path of the input, position).
        kept: the kept columns of each document.
        drops: all drops, in order.
        units, batches: how many there were.
        skipped: records left out, by reason.
    """

    texts: list[str]
    ids: list[str | None]
    places: list[tuple[str, int]]
    kept: list[dict[str, Any]]
    drops: list[Drop]
    units: int
    batches: int
    skipped: Counter[str]

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """(reason, position) of each drop."""
        return [(drop.reason, drop.position) for drop in self.drops]


def resolve_source(inputs: Iterable[object] = (), **fields: Any) -> SourcePlan:
    """Resolve a source by fields as a recipe has them: text, numbers, lists."""
    given = {"inputs": list(map(str, inputs)), **fields}
    return _resolve_source(parse(SourceRequest, Values(given)))


def read_source(*inputs: str, target_bytes: int = 1 << 30, **arguments: Any) -> Read:
    """Resolve and read a source through the public functions, checking what batches promise."""
    return read_plan(resolve_source(list(map(str, inputs)), **arguments), target_bytes)


def read_plan(plan: SourcePlan, target_bytes: int = 1 << 30) -> Read:
    """Read a resolved source."""
    units = [
        unit
        for index, input in enumerate(plan.inputs)
        for unit in plan_units(index, input, plan.options, target_bytes)
    ]
    result = Read([], [], [], [], [], len(units), 0, Counter())
    for batch in read_units(plan.inputs, units, plan.options):
        assert batch.offsets[0] == 0
        assert batch.offsets[-1] == len(batch.data)
        assert (batch.text_bytes > 0).all()
        assert len(batch.inputs) == len(batch.positions) == batch.documents
        assert batch.rows_in == batch.documents + len(batch.dropped) + sum(batch.skipped.values())
        assert batch.documents <= 1 or len(batch.data) <= plan.options.batch_bytes
        result.batches += 1
        result.texts += [batch.text(k) for k in range(batch.documents)]
        result.ids += [None] * batch.documents if batch.ids is None else batch.ids.to_pylist()
        result.places += [
            (plan.inputs[i].path, p)
            for i, p in zip(batch.inputs.tolist(), batch.positions.tolist(), strict=True)
        ]
        if plan.options.keep_schema is not None and batch.documents:
            assert batch.keep is not None
            assert batch.keep.schema == plan.options.keep_schema
            result.kept += batch.keep.to_pylist()
        result.drops += batch.dropped
        for (_, reason), count in batch.skipped.items():
            result.skipped[reason] += count
    return result
