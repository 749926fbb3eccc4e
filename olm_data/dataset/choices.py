"""What options of tokenising may be: the words that plans, manifests and recipes share."""

from __future__ import annotations

from typing import Literal

import msgspec

from olm_data.select.where import Condition

Container = Literal["npy", "raw"]
OnInvalid = Literal["skip", "replace", "error"]
OnUnknown = Literal["keep", "drop"]
SpecialPolicy = Literal["plain", "allow", "error"]


class SourceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be read, as it is asked for; None leaves a choice to the source.

    Attributes:
        inputs: Files, folders, patterns or URLs; - is standard input.
        format: Of standard input (-): jsonl, txt, ...  [default: jsonl]
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
    on_invalid: OnInvalid = "skip"
    on_unknown: OnUnknown = "keep"
