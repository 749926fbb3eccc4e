"""Rows of chats out of files: `--format chat`, for JSON Lines, JSON arrays and parquet.

lines, elements, rows -> --where -> Conversation -> its JSON as the text of a document
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from olm_data.dataset.account import INVALID
from olm_data.dataset.inputs import ChatOptions, InputFile, ReadOptions, Unit
from olm_data.errors import InputError, UsageError, printable, said_by
from olm_data.extensions.chat.conversations import MESSAGES, SHARED, Refused, conversation
from olm_data.extensions.chat.encoder import ChatEncoder
from olm_data.extensions.chat.template import TOKENIZER, Template, find_template
from olm_data.extensions.tables.json_array import elements
from olm_data.select.evaluate import matches
from olm_data.select.where import columns as columns_of
from olm_data.sources import jsonl
from olm_data.sources.base import ColumnKinds, DocumentBatch, Drop, Scan
from olm_data.sources.columns import MISSING, flattened, value_of
from olm_data.sources.files import open_binary, reading
from olm_data.sources.formats import codec_of, whole_file
from olm_data.sources.json_records import FieldSeen, record_batches
from olm_data.sources.line_blocks import plain_blocks, stream_blocks
from olm_data.sources.parquet import opened, rows_at_once
from olm_data.tokenization.recipe import Recipe
from olm_data.tokenizer.tokenizer import TokenizerSpec

ROWS = 256
"""Taken at a time."""

Row = tuple[int, Any]
"""Place of a row, and its JSON in bytes, or its values."""


class Chats:
    """The reader of `--format chat`, whatever the files; and what else a run of it needs."""

    def columns(self, input: InputFile, options: ReadOptions) -> ColumnKinds:
        """Return the columns of the first rows.

        Raises:
            InputError: none has messages, or the format is none that chats are read from.
        """
        seen: dict[str, FieldSeen] = {}
        for _, given in islice(_rows(Scan(input, _whole(input), options)), ROWS):
            try:
                row = _values(given, "error")
            except Refused:
                continue
            for name, value in flattened(row):
                seen.setdefault(name, FieldSeen()).add(value)
        known = {options.text_column, MESSAGES, SHARED, "completion"}
        if seen and not known & seen.keys():
            names = [printable(name) for name in list(seen)[:20]]
            raise InputError(
                "no row at the start of the file is a conversation",
                where=input.path,
                why=f"its fields are: {', '.join(names)}",
                fix="say --text-column FIELD, where the messages are",
            )
        return {name: found.kept for name, found in seen.items()}

    def units(
        self, index: int, input: InputFile, options: ReadOptions, target_bytes: int
    ) -> list[Unit]:
        """See `readers.plan_units`: lines are cut, other files are one unit."""
        if input.format == "jsonl":
            return jsonl.units(index, input, options, target_bytes)
        return whole_file(index, input)

    def read(self, scan: Scan) -> Iterator[DocumentBatch]:
        """Yield the conversations of a unit, as JSON."""
        rows = iter(_rows(scan))
        while some := list(islice(rows, ROWS)):
            past = [place for place, _ in some if scan.is_past(place)]
            yield from _batch(scan, [row for row in some if row[0] not in past])
            if past:
                return

    def options(self, recipe: Recipe, tokenizer: TokenizerSpec) -> ChatOptions:
        """Return what a recipe says of chats, with the template's text.

        Raises:
            UsageError: there is no template, or fields do not go together.
            InputError: it is no template.
        """
        reference = recipe.tokenizer or "gpt2"
        template, special = find_template(recipe.chat_template or TOKENIZER, reference)
        for name, token in (("eos_token", tokenizer.eos_token), ("bos_token", tokenizer.bos_token)):
            if token is not None:
                special[name] = token
        if recipe.special != "plain" or recipe.encoder not in ("auto", "hf"):
            raise UsageError(
                "text of a chat that spells a special token is text, encoded by the reference",
                where="--format chat",
                fix="leave out --special and --encoder",
            )
        made = ChatOptions(
            template=template,
            special=special,
            train=recipe.train or "assistant",
            thinking=recipe.train_thinking or "keep",
            ends=recipe.train_ends or "turn",
            max_tokens=recipe.max_tokens,
            too_long=recipe.too_long or "drop",
        )
        Template(template, special)
        return made

    def encoder(self, tokenizer: TokenizerSpec, options: ChatOptions) -> ChatEncoder:
        """Return what encodes the JSON of conversations."""
        return ChatEncoder(tokenizer, options)


CHATS = Chats()
_ERRORS = {"skip": "strict", "error": "strict", "replace": "replace"}
"""What `--on-invalid` is to Python's codecs."""


def _whole(input: InputFile) -> Unit:
    return Unit(input=0, start=0, stop=max(input.bytes, 1), bytes=max(input.bytes, 1))


def _rows(scan: Scan) -> Iterator[Row]:
    """Yield the rows of a unit with their places.

    Raises:
        InputError: chats are not read from this format, or the file is damaged.
    """
    input, unit = scan.input, scan.unit
    if input.format == "jsonl":
        compressed = codec_of(input.url) is not None
        blocks = stream_blocks(input) if compressed else plain_blocks(input, unit.start, unit.stop)
        for block, place in blocks:
            at = place
            for line in block.split(b"\n"):
                if line.strip():
                    yield at, line
                at += 1 if input.position == "line" else len(line) + 1
    elif input.format == "json":
        yield from enumerate(elements(input))
    elif input.format == "parquet":
        row = 0
        with open_binary(input, ahead=False) as raw, reading(input, raw):
            file = opened(input, raw)
            names = file.schema_arrow.names
            for group in range(file.metadata.num_row_groups):
                step = min(ROWS, rows_at_once(input, raw, file, group, names))
                for batch in file.iter_batches(step, row_groups=[group], use_threads=False):
                    for values in batch.to_pylist():
                        yield row, _without_null(values)
                        row += 1
    else:
        raise InputError(
            f"chats are not read from files of the format {input.format}",
            where=input.path,
            fix="write them as .jsonl, .json or .parquet",
        )


def _without_null(value: Any) -> Any:
    """Return a value of a table without its nulls: a column's rows all have the same fields."""
    if isinstance(value, dict):
        return {name: _without_null(v) for name, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_null(v) for v in value]
    return value


def _values(given: Any, on_invalid: str) -> dict[str, Any]:
    """Return a row as an object.

    Raises:
        Refused: it is none, or no UTF-8.
    """
    if isinstance(given, bytes):
        try:
            given = json.loads(given.decode(errors=_ERRORS[on_invalid]))
        except UnicodeDecodeError as error:
            raise Refused(INVALID, str(error)) from error
        except (ValueError, RecursionError) as error:
            raise Refused("malformed", said_by(error)) from error
    if not isinstance(given, dict):
        raise Refused("malformed", f"a JSON {type(given).__name__}, not an object")
    return given


def _text(row: dict[str, Any], options: ReadOptions) -> tuple[bytes, bool]:
    """Return the text of a row's conversation, and whether U+FFFD was put into it."""
    text = conversation(row, options.text_column).text
    try:
        return text.encode(), False
    except UnicodeEncodeError as error:
        if options.on_invalid != "replace":
            raise Refused(INVALID, f"a lone surrogate: {error.reason}") from error
        mended = text.encode(errors="surrogatepass").decode(errors="replace")
        return mended.encode(), True


def _batch(scan: Scan, rows: Sequence[Row]) -> Iterator[DocumentBatch]:
    options = scan.options
    read: list[Row] = []
    found: list[dict[str, Any]] = []
    drops: list[Drop] = []
    replaced = 0

    def drop(error: Refused, place: int, given: Any) -> None:
        raw = given if isinstance(given, bytes) else json.dumps(given, default=str).encode()
        drops.append(scan.drop(error.reason, place, printable(str(error)), raw))

    for place, given in rows:
        try:
            found.append(_values(given, options.on_invalid))
            read.append((place, given))
        except Refused as error:
            drop(error, place, given)
    chosen = np.ones(len(found), bool)
    if options.condition is not None:
        values = {name: _column(found, name) for name in columns_of(options.condition)}
        chosen = matches(options.condition, values, len(found))
    kept: list[dict[str, Any]] = []
    texts: list[bytes] = []
    positions: list[int] = []
    for k in np.flatnonzero(chosen).tolist():
        place, given = read[k]
        try:
            text, mended = _text(found[k], options)
        except Refused as error:
            drop(error, place, given)
            continue
        utf8 = not isinstance(given, bytes) or given.decode(errors="ignore").encode() == given
        replaced += mended or not utf8
        kept.append(found[k])
        texts.append(text)
        positions.append(place)

    yield from record_batches(
        scan,
        texts,
        partial(_column, kept),
        positions=np.array(positions, np.int64),
        dropped=drops,
        rows_in=len(rows),
        filtered=int((~chosen).sum()),
        replaced=replaced,
    )


def _column(rows: Iterable[dict[str, Any]], name: str) -> list[Any]:
    found = (value_of(row, name) for row in rows)
    return [None if value is MISSING else value for value in found]
