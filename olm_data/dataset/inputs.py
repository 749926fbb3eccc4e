"""What is read: input files, the units they are cut into, and what is taken from each record.

Plans and jobs hold these values as JSON, so that a worker anywhere can read its units; `sources`
finds and reads them. Each is a frozen Struct, picklable, made of strings and integers.

Also: what options of tokenising may be: the words that plans, manifests and recipes share.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeVar, get_args

import msgspec

from olm_data.bounded_json import Size, Sparse
from olm_data.select.where import Condition, Node, parse

if TYPE_CHECKING:
    import pyarrow as pa  # training opens manifests and needs no Arrow


Container = Literal["npy", "raw"]
OnInvalid = Literal["skip", "replace", "error"]
OnUnknown = Literal["keep", "drop"]
SpecialPolicy = Literal["plain", "allow", "error"]


class SourceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be read, as it is asked for; None leaves a choice to the source.

    Attributes:
        inputs: Files, folders, patterns or URLs; - is standard input.
        format: Of standard input (-): jsonl, txt, ...; of any input: chat.  [default: jsonl]
        source: A named dataset, hf:ORG/NAME[:CONFIG], pylib, or module:Class.
        subset: Which part of a named dataset.
        root: A local mirror of a named dataset, with the same layout.
        split: Split of an hf: dataset.  [default: train]
        text_column: Column or JSON field of the text.  [default: text]
        id_column: Column or field of the document's id.  [default: id, if any]
        keep: More columns to keep beside each document: a,b.
        separator: Cut .txt files: "blank-lines", or the string between documents.
        delimiter: Separator of the fields in CSV files.  [default: , or tab by name]
        where: Take only records that match: "score >= 3 and language == 'en'".
        filter: A function of yours that keeps records: my_lab.filters:keep.
        on_invalid: Text that is not UTF-8: into the quarantine, mended with U+FFFD, or an error.
        on_unknown: Text with what the tokenizer does not know: with unknown tokens, or left out.
    """

    inputs: tuple[str, ...] = ()
    format: str | None = None
    source: str | None = None
    subset: str | None = None
    root: str | None = None
    split: str | None = None
    text_column: str | None = None
    id_column: str | None = None
    keep: tuple[str, ...] | None = None
    separator: str | None = None
    delimiter: str | None = None
    where: Condition | None = None
    filter: str | None = None
    on_invalid: OnInvalid = "skip"
    on_unknown: OnUnknown = "keep"


PositionKind = Literal["row", "line", "byte"]

Share = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}(?:/0*[1-9][0-9]{0,17})?$")]
"""A fraction as it is stored: `1/100`, or `0`."""

KeepType = Literal["string", "int64", "double", "bool"]
KEEP_TYPES: tuple[str, ...] = get_args(KeepType)
"""Types of kept columns; each is Arrow's own name of it, see `keep_type`."""


def keep_type(kind: str) -> pa.DataType:
    """Return the Arrow type that one of `KEEP_TYPES` names."""
    import pyarrow as pa

    return pa.type_for_alias(kind)


class InputFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file (or one shard of a hub dataset) that documents are read from.

    Attributes:
        path: its name in manifests and messages, relative to the common root of the inputs or
            prefixed by the repository (`HuggingFaceFW/fineweb-edu/...`, `pylib:...`); digested.
        url: where to read it (absolute local path, or URL without credentials); never
            digested.
        bytes: size of the file as stored; 0 when it is not known before reading (formats "hub" and
            "own").
        revision: opaque string that changes when the content may have changed (mtime and size, or
            ETag); never digested. Compare with `current_revision(input)`.
        format: how to read it, a name in `olm_data.formats`.
        position: what `DocumentBatch.positions` counts in this input: "row" (0-based), "line"
            (0-based) or "byte" (offset of the line or document in the decompressed file).
        until: position of the last record to read, or None to read them all (see `--limit`).
    """

    path: str
    url: str
    bytes: Size
    revision: str
    format: Annotated[str, msgspec.Meta(max_length=64)]
    position: PositionKind
    until: Size | None = None


class Unit(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A part of one input that is read by itself; `[input, start, stop, bytes]` in a plan.

    Attributes:
        input: index of the `InputFile` in the plan's list.
        start, stop: [start, stop) in bytes for a plain JSONL file, row groups for parquet, record
            batches for Arrow; 0..1 for everything that is read as a whole.
        bytes: estimated size of the text, used for planning only.
    """

    input: Size
    start: Size
    stop: Size
    bytes: Size


T = TypeVar("T")


def written(default: T) -> T:
    """Return a field's default that is written, too, where others are left out of the file."""
    return msgspec.field(default_factory=lambda: default)


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How conversations become tokens, and which of these are trained.

    Attributes:
        template: Jinja text of the chat template.
        special: special tokens by the names that it knows: `eos_token`.
        train: `assistant`, `last` (its last message), `all`, or roles with commas between.
        thinking: whether thoughts in answers are trained, or masked.
        ends: which tokens that end a turn are trained: of all turns, of those that are trained, of
            the last of these, or none.
        max_tokens: longer conversations are dropped or cut, see `too_long`; None: any are taken.
        too_long: `drop`, or which end loses turns: `left` (behind the system message) or `right`.
    """

    template: str
    special: dict[str, str]
    train: str
    thinking: Literal["keep", "mask"]
    ends: Literal["all", "turn", "last", "none"]
    max_tokens: Size | None
    too_long: Literal["drop", "left", "right"]


class OwnFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A filter of somebody's own: its import path, and the sha256 of its module's source."""

    path: str
    sha256: str


class RecordOptions(Sparse, frozen=True, kw_only=True):
    """What to take from each record: all of it changes bytes and is digested.

    Attributes:
        text_column: the column or JSON field with the text.
        id_column: the column or field with the document's id, or None for no ids. (A text file that
            is one document has its path as id, whatever this says.)
        keep: (column, type) pairs kept beside each document; types are of `KEEP_TYPES`.
            `resolve_source` finds the types.
        separator: how text files are split: None (one document a file), "blank-lines", or the
            string between documents.
        delimiter: one character between the fields of CSV files; None for a comma in .csv and a tab
            in .tsv.
        where: the condition a record must meet to be read further (see `where.py`), or None.
        filter: the function that keeps records or not, of the user's own, or None.
        libraries: those that make the text, with their versions: `pypdf 7.1.1`.
        exclude: digest of the ids to leave out (`select.IdSet.sha256`), or None.
        sample: share of the documents to draw by their texts, a fraction's text, or None for all.
        seed: of the draw; None where nothing is drawn.
        on_invalid: what becomes of text that is not UTF-8 or holds a lone surrogate: "skip" drops
            it, "replace" puts U+FFFD for what cannot be decoded. "error" reads like "skip"; whoever
            counts the drops makes an error of the first.
        on_unknown: what becomes of a document of which something is the unknown token: "keep" or
            "drop". Reading keeps it; whoever encodes drops it.
        chat: how conversations are read and encoded; None: records are texts.
    """

    text_column: str = written("text")
    id_column: str | None = written(None)
    keep: tuple[tuple[str, KeepType], ...] = written(())
    separator: str | None = written(None)
    delimiter: str | None = None
    where: str | None = None
    filter: OwnFilter | None = None
    libraries: tuple[str, ...] = ()
    exclude: str | None = None
    sample: Share | None = None
    seed: int | None = None
    on_invalid: OnInvalid = "skip"
    on_unknown: OnUnknown = "keep"
    chat: ChatOptions | None = None

    words: ClassVar[tuple[str, ...]] = ("on_invalid", "on_unknown")
    uses_of_seed: ClassVar[tuple[str, ...]] = ("sample",)

    def __post_init__(self) -> None:
        for name in self.words:  # msgspec knows a default by identity
            msgspec.structs.force_setattr(self, name, sys.intern(getattr(self, name)))
        used = any(getattr(self, name) for name in self.uses_of_seed)
        seed = (self.seed or 0) if used else None
        msgspec.structs.force_setattr(self, "seed", seed)

    @property
    def recorded(self) -> Self:
        """As files keep it: to stop at invalid text changes no byte, as it makes no dataset."""
        stops = self.on_invalid == "error"
        return msgspec.structs.replace(self, on_invalid="skip") if stops else self

    @property
    def keep_schema(self) -> pa.Schema | None:
        """Schema of `DocumentBatch.keep`, or None if nothing is kept."""
        if not self.keep:
            return None
        import pyarrow as pa

        return pa.schema([pa.field(name, keep_type(kind)) for name, kind in self.keep])

    @property
    def condition(self) -> Node | None:
        """The parsed `where`, or None."""
        return None if self.where is None else parse(self.where)


class ReadOptions(RecordOptions, frozen=True, kw_only=True):
    """How to read: what to take from each record, and how much at a time.

    Attributes:
        batch_bytes: batches end once they hold this much text; one document may be larger.
    """

    batch_bytes: Size = written(4 << 20)
