"""What every source is: inputs cut into units, units read as batches of documents in buffers.

Values only: the classes here are frozen, picklable and made of strings and integers (but for the
batches), so that a plan can hold them as JSON and a worker anywhere can read its units from it.

    resolve_source(...) -> SourcePlan(name, inputs, options)
    plan_units(index, input, options, target_bytes) -> [Unit]     cuts, by size alone
    read_units(inputs, units, options) -> DocumentBatch, ...      in input order, bounded by bytes

Nothing here decides which documents are good enough: a document is only dropped when there is no
text to encode (see `DROP_REASONS`), and every drop is reported with its place. What the user asked
to leave out (see `SKIP_REASONS`) is counted by input and reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from olm_data.select.selection import IdSet
from olm_data.select.where import Node, parse
from olm_data.sources.passed import Passed

Format = Literal["jsonl", "json", "csv", "parquet", "arrow", "txt", "hub"]
OnInvalid = Literal["skip", "replace", "error"]
OnUnknown = Literal["keep", "drop"]
PositionKind = Literal["row", "line", "byte"]

DROP_REASONS: dict[str, str] = {
    "empty": "the text is empty or white space only",
    "no_text": "the text is missing, null or not a string",
    "malformed": "the line is not a JSON object",
    "invalid_utf8": "the text is not valid UTF-8, or holds a lone surrogate",
    "unencodable": "the tokenizer has no ids for the text that may stand in a document",
}

SKIP_REASONS: dict[str, str] = {
    "filtered": "the record does not match --where",
    "excluded": "its id is in --exclude-ids",
    "unsampled": "it was not drawn by --sample",
    "duplicate": "the same text was read before (--dedup)",
    "unknown": "the tokenizer does not know a character or word of the text (--on-unknown drop)",
}

RAW_BYTES = 1 << 20
"""Bytes of a bad record that are kept for the quarantine."""

KEEP_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int64": pa.int64(),
    "double": pa.float64(),
    "bool": pa.bool_(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file (or one shard of a hub dataset) that documents are read from.

    Attributes:
        path: its name in manifests and messages, relative to the common root of the inputs or
            prefixed by the repository (`HuggingFaceFW/fineweb-edu/...`, `pylib:...`); digested.
        url: where to read it (absolute local path, or URL without credentials); never
            digested.
        bytes: size of the file as stored; 0 when it is not known before reading (format "hub").
        revision: opaque string that changes when the content may have changed (mtime and size, or
            ETag); never digested. Compare with `current_revision(input)`.
        format: how to read it.
        position: what `DocumentBatch.positions` counts in this input: "row" (0-based), "line"
            (0-based) or "byte" (offset of the line or document in the decompressed file).
        until: position of the last record to read, or None to read them all (see `--limit`).
    """

    path: str
    url: str
    bytes: int
    revision: str
    format: Format
    position: PositionKind
    until: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> InputFile:
        """Return the input that `to_json` wrote."""
        return cls(**value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A part of one input that is read by itself.

    Attributes:
        input: index of the `InputFile` in the plan's list.
        start, stop: [start, stop) in bytes for a plain JSONL file, row groups for parquet, record
            batches for Arrow; 0..1 for everything that is read as a whole.
        bytes: estimated size of the text, used for planning only.
    """

    input: int
    start: int
    stop: int
    bytes: int

    def to_json(self) -> list[int]:
        """Return `[input, start, stop, bytes]`."""
        return [self.input, self.start, self.stop, self.bytes]

    @classmethod
    def from_json(cls, value: list[int]) -> Unit:
        """Return the unit that `to_json` wrote."""
        index, start, stop, size = value
        return cls(input=index, start=start, stop=stop, bytes=size)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """What to take from each record; all of it but `batch_bytes` changes bytes and is digested.

    Attributes:
        text_column: the column or JSON field with the text.
        id_column: the column or field with the document's id, or None for no ids. (A text file that
            is one document has its path as id, whatever this says.)
        keep: (column, type) pairs kept beside each document; types are the keys of `KEEP_TYPES`.
            `resolve_source` finds the types.
        separator: how text files are split: None (one document a file), "blank-lines", or the
            string between documents.
        delimiter: one character between the fields of CSV files; None for a comma in .csv and a tab
            in .tsv.
        where: the condition a record must meet to be read further (see `where.py`), or None.
        exclude: digest of the ids to leave out (`select.IdSet.sha256`), or None.
        sample: share of the documents to draw by their texts, a fraction's text, or None for all.
        seed: of the draw.
        on_invalid: what becomes of text that is not UTF-8 or holds a lone surrogate: "skip" drops
            it, "replace" puts U+FFFD for what cannot be decoded. "error" reads like "skip"; whoever
            counts the drops makes an error of the first.
        on_unknown: what becomes of a document of which something is the unknown token: "keep" or
            "drop". Reading keeps it; whoever encodes drops it.
        batch_bytes: batches end once they hold this much text; one document may be larger.
    """

    text_column: str = "text"
    id_column: str | None = None
    keep: tuple[tuple[str, str], ...] = ()
    separator: str | None = None
    delimiter: str | None = None
    where: str | None = None
    exclude: str | None = None
    sample: str | None = None
    seed: int = 0
    on_invalid: OnInvalid = "skip"
    on_unknown: OnUnknown = "keep"
    batch_bytes: int = 4 << 20

    @property
    def keep_schema(self) -> pa.Schema | None:
        """The Arrow schema of the kept columns, or None where nothing is kept."""
        if not self.keep:
            return None
        return pa.schema([pa.field(name, KEEP_TYPES[kind]) for name, kind in self.keep])

    @property
    def condition(self) -> Node | None:
        """The parsed `where`, or None."""
        return None if self.where is None else parse(self.where)

    def to_json(self) -> dict[str, Any]:
        """Return the options that change bytes, as a JSON object for plans and manifests."""
        used = {
            "delimiter": self.delimiter,
            "where": self.where,
            "exclude": self.exclude,
            "sample": self.sample,
            "seed": None if self.sample is None else self.seed,
            # an error changes no byte: it makes no dataset
            "on_invalid": "replace" if self.on_invalid == "replace" else None,
            "on_unknown": "drop" if self.on_unknown == "drop" else None,
        }
        return {
            "text_column": self.text_column,
            "id_column": self.id_column,
            "keep": [list(pair) for pair in self.keep],
            "separator": self.separator,
        } | {name: value for name, value in used.items() if value is not None}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ReadOptions:
        """Return the options that `to_json` wrote."""
        fields = dict(value)
        fields["keep"] = tuple((name, kind) for name, kind in fields.get("keep", ()))
        return cls(**fields)


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
        passed: what lies among the inputs and is not read.
        excluded: the ids to leave out, or None.
        limit: take this many documents, or None; `limited` has set the last input's `until`.
        text_bytes: bytes of text there are, where they are known.
    """

    name: str
    inputs: tuple[InputFile, ...]
    options: ReadOptions
    passed: tuple[Passed, ...] = ()
    excluded: IdSet | None = None
    limit: int | None = None
    text_bytes: int | None = None
