"""What every source is: inputs cut into units, units read as batches of documents in buffers.

Values only. What plans and jobs hold of it as JSON is in `dataset.inputs`.

    resolve_source(...) -> SourcePlan(name, inputs, options)
    plan_units(index, input, options, target_bytes) -> [Unit]     cuts, by size alone
    read_units(inputs, units, options) -> DocumentBatch, ...      in input order, bounded by bytes

Nothing here decides which documents are good enough: a document is only dropped when there is no
text to encode (see `account.DROP_REASONS`), and every drop is reported with its place. What the
user asked to leave out (see `account.SKIP_REASONS`) is counted by input and reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from olm_data.dataset.inputs import InputFile, ReadOptions, Unit
from olm_data.dataset.tools import PassedCount
from olm_data.select.selection import IdSet

ColumnKinds = dict[str, set[str]]
"""Columns, in order, and the types (of `KEEP_TYPES`) that their values can be kept as."""

TextOf = Callable[[Mapping[str, Any]], str | None]
"""Takes the text out of a row; None: it has none."""

RAW_BYTES = 1 << 20
"""Bytes of a bad record that are kept for the quarantine."""


@dataclass(frozen=True, slots=True)
class Scan:
    """One unit to read: of which input, and what to take from its records."""

    input: InputFile
    unit: Unit
    options: ReadOptions

    @property
    def index(self) -> int:
        """Index of the input in the plan's list."""
        return self.unit.input

    def is_past(self, position: int) -> bool:
        """Whether a record lies after the last one to read (`InputFile.until`)."""
        return self.input.until is not None and position > self.input.until

    def drop(self, reason: str, position: int, detail: str = "", record: bytes = b"") -> Drop:
        """Return the drop of a record of this unit."""
        return Drop.of(reason, self.index, position, detail, record)


@dataclass(frozen=True, slots=True)
class Drop:
    """A record that is not a document: why, and where to find it.

    Attributes:
        reason: a key of `DROP_REASONS`.
        input: index of the input in the plan's list.
        position: its place, counted as the input's `position` says.
        detail: one printable sentence, or "".
        raw: for the quarantine, the record as read (a line, or the text of a row), at most
            `RAW_BYTES` of it; empty where there is nothing to keep.
        size: bytes of the whole record.
    """

    reason: str
    input: int
    position: int
    detail: str = ""
    raw: bytes = b""
    size: int = 0

    @classmethod
    def of(cls, reason: str, input: int, position: int, detail: str, record: bytes) -> Drop:
        """Return the drop of a bad record, with its bytes up to `RAW_BYTES`."""
        return cls(reason, input, position, detail, record[:RAW_BYTES], len(record))


@dataclass(frozen=True, slots=True)
class DocumentBatch:
    """Documents in input order, as buffers.

    Attributes:
        data: uint8[n], the UTF-8 text of the documents, one after another, no separators.
        offsets: int64[d + 1], document k is data[offsets[k]:offsets[k + 1]]; offsets[0] is 0.
        inputs: int32[d], index of each document's input in the plan's list.
        positions: int64[d], place of each document in its input.
        ids: string array of length d (null where a record has none), or None.
        keep: record batch of the kept columns, d rows, schema `ReadOptions.keep_schema`; or None.
        dropped: records of this stretch of the input that are no documents.
        rows_in: records seen: documents, dropped and skipped; blank lines are no records.
        skipped: (input, key of `SKIP_REASONS`) -> records the user's own selection left out.
        replaced: input -> records in whose text U+FFFD stands for what could not be decoded.
    """

    data: np.ndarray
    offsets: np.ndarray
    inputs: np.ndarray
    positions: np.ndarray
    ids: pa.Array | None = None
    keep: pa.RecordBatch | None = None
    dropped: tuple[Drop, ...] = field(default=())
    rows_in: int = 0
    skipped: Mapping[tuple[int, str], int] = field(default_factory=dict)
    replaced: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def without_documents(cls, **fields: Any) -> DocumentBatch:
        """Return a batch that only accounts for records."""
        return cls(
            data=np.empty(0, np.uint8),
            offsets=np.zeros(1, np.int64),
            inputs=np.empty(0, np.int32),
            positions=np.empty(0, np.int64),
            **fields,
        )

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    @property
    def text_bytes(self) -> np.ndarray:
        """int64[d], bytes of text of each document."""
        return np.diff(self.offsets)

    def text(self, k: int) -> str:
        """Return document k as a string."""
        return self.data[self.offsets[k] : self.offsets[k + 1]].tobytes().decode()


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePlan:
    """What a command line names: inputs in reading order and how to read them.

    Attributes:
        name: a short name fit for a default output folder, e.g. `fineweb-edu-sample-10BT`.
        inputs: in reading order (sorted by path inside each argument).
        options: how to read them, types of kept columns resolved.
        passed: what lies among the inputs and is not read, by reason.
        excluded: the ids to leave out, or None.
        limit: take this many documents, or None; `limited` has set the last input's `until`.
        text_bytes: bytes of text there are, where they are known.
    """

    name: str
    inputs: tuple[InputFile, ...]
    options: ReadOptions
    passed: dict[str, PassedCount] = field(default_factory=dict)
    excluded: IdSet | None = None
    limit: int | None = None
    text_bytes: int | None = None

    def reading(self, **options: Any) -> SourcePlan:
        """Return the plan with some of its options changed."""
        return replace(self, options=msgspec.structs.replace(self.options, **options))
