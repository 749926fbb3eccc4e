"""Documents, rows, steps and sightings as lines for people, in colour or plain.

Text is shown so that it cannot forge what is around it: control characters are escaped and each
line of it stands behind a bar. In colour, tokens alternate between two backgrounds, special tokens
are red, and a string that was searched for is bold; colours are ANSI codes that we alone write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import UNSET

from olm_data.counts import counted
from olm_data.errors import printable
from olm_data.extensions.show.documents import DocumentSightings
from olm_data.extensions.show.steps import TRAINED, Batches, StepView
from olm_data.extensions.show.token_text import token_bytes, token_texts, trained_tokens
from olm_data.printing import table
from olm_data.rows.views import DocumentView, RowView
from olm_data.tokenizer.tokenizer import TokenizerSpec

SHOWN_IDS = 16
SHOWN_TEXT = 1200
SHOWN_OF_EACH = 240
"""Characters of each document of a step."""

SHOWN_SIGHTINGS = 20

_HEAD, _SOFT, _SPECIAL = "1;36", "2", "1;97;41"
_TOKENS = ("38;5;16;48;5;153", "38;5;16;48;5;223")  # dark letters on light blue, light orange
_FOUND = "1;38;5;16;48;5;226"  # on yellow


def render(
    view: DocumentView | RowView,
    tokenizer: TokenizerSpec | None = None,
    *,
    full: bool = False,
    found: str = "",
    most: int = SHOWN_TEXT,
) -> str:
    """Return a view as lines.

    Args:
        tokenizer: that of the view, to paint each token by ANSI codes; None: without colours.
        full: show all of the text; otherwise its first `most` characters.
        found: a string to mark in the text, in colour.
    """
    if isinstance(view, DocumentView):
        return _document(view, tokenizer, full, found, most)
    colour = tokenizer is not None
    origin = f"token {view.first_token:,}"
    if view.source is not None:
        kept = f" ({printable(view.view)})" if view.view else ""
        origin = (
            f"stage {view.stage}, source {view.source}{kept}, epoch {view.epoch}, "
            f"row {view.source_row:,} of the source, {origin}"
        )
    count = sum(piece.stop - piece.start for piece in view.pieces)
    documents = len({piece.document for piece in view.pieces})
    lines = [f"== row {view.row}: {origin}; {count:,} tokens in {documents} documents"]
    lines[0] = _painted(lines[0], _HEAD, colour)
    at = 0
    for piece in view.pieces:
        if at and at % view.sequence_length == 0:
            border = f"== trained as another row: {view.sequence_length:,} tokens at once"
            lines.append(_painted(border, _HEAD, colour))
        lines.append(_document(piece, tokenizer, full, found, most))
        at += piece.stop - piece.start
    return "\n".join(lines)


def step_lines(
    batches: Batches, view: StepView, *, full: bool = False, colour: bool = False
) -> Iterator[str]:
    """Yield a step as lines, each row as soon as it is read."""
    state = "" if view.state is None else f", {view.state}"
    tokens = batches.batch_sizes.size(view.step - 1)
    yield (
        f"step {view.step:,} of {batches.steps.count:,}{state}: {view.rows_of_step:,} rows, "
        f"{tokens:,} tokens"
    )
    for (stage, source), count in batches.sources(view.step).items():
        yield f"  stage {printable(stage)}, source {printable(source)}: {count:,} rows"
    yield f"  order {view.order}"
    rest = view.rows_of_step
    for row in view.rows:
        yield f"\nrow {row.row_of_step} of the step{_rank(row)}"
        tokenizer = batches.rows.tokenizer_of(row.source) if colour else None
        yield render(row, tokenizer, full=full, most=SHOWN_OF_EACH)
        rest -= 1
    if rest:
        yield f"\n{rest:,} more rows of this step"


def document_lines(
    found: DocumentSightings,
    tokenizer: TokenizerSpec | None = None,
    *,
    text: str = "",
    full: bool = False,
) -> Iterator[str]:
    """Yield a document and the rows that see it as lines; arguments as of `render`."""
    address = f"{found.source}:{found.document.document}"
    yield f"source {printable(found.source)}, address {printable(address)}"
    yield render(found.document, tokenizer, full=full, found=text, most=SHOWN_OF_EACH)
    if not found.sightings:
        yield "   no row of the run sees it"
        return
    seen = [counted(len({sighting.row for sighting in found.sightings}), "row") + " of the run"]
    steps = {sighting.step for sighting in found.sightings if sighting.step}
    trained = {sighting.step for sighting in found.sightings if sighting.state == TRAINED}
    if any(sighting.step is not UNSET for sighting in found.sightings):
        seen.append(counted(len(steps), "step"))
    if any(sighting.state is not UNSET for sighting in found.sightings):
        seen.append(f"{len(trained):,} of them trained")
    said = "its tokens from and to, at this token of the row"
    yield f"   seen in {', '.join(seen)}; {said}:"
    shown = len(found.sightings) if full else SHOWN_SIGHTINGS
    yield from table(found.sightings[:shown], *_SIGHTING, indent="   ")
    if len(found.sightings) > shown:
        yield f"   ... {len(found.sightings) - shown:,} more (--full shows all)"


_SIGHTING = (
    *("row", "step", "state", "row_of_step=of step", "rank", "micro_batch", "stage", "epoch"),
    *("start=from", "stop=to", "offset=at", "shorter_rows", "holds_text=holds it"),
)


def _document(
    view: DocumentView, tokenizer: TokenizerSpec | None, full: bool, found: str, most: int
) -> str:
    colour = tokenizer is not None
    name = "" if view.id is None else f"  id {printable(view.id)}"
    part = ""
    if (view.start, view.stop) != (0, view.tokens):
        part = f"  tokens {view.start:,} to {view.stop:,} of {view.tokens:,}"
    head = [
        _painted(f"-- document {view.document}{name}{part}", _HEAD, colour),
        f"   {printable(view.input)}, {view.position_kind} {view.position:,}; "
        f"{view.shard}; {view.tokens:,} tokens, {view.text_bytes:,} bytes of text",
    ]
    if view.columns:
        kept = (f"{printable(key)}={printable(str(value))}" for key, value in view.columns.items())
        head.append("   " + ", ".join(kept))
    head.append(_ids(view, colour))
    if view.trained is not UNSET:
        head.append(f"   {trained_tokens(view):,} of these {len(view.ids):,} tokens are trained")
    shown = len(view.text) if full else min(len(view.text), most)
    if view.bos:
        head.append("   " + _painted("[BOS]", _SPECIAL, colour))
    pieces = _coloured(view, tokenizer, shown, found) if tokenizer else [(view.text[:shown], "")]
    body = [f"   | {line}" for line in _lines(pieces)]
    if shown < len(view.text):
        body.append(f"   ... {len(view.text) - shown:,} more characters (--full shows all)")
    end = ["   end of document"] if view.stop == view.tokens else []
    if view.eos:
        end = ["   " + _painted("[EOS]", _SPECIAL, colour) + " end of document"]
    return "\n".join(head + body + end)


def _ids(view: DocumentView, colour: bool) -> str:
    """Return the line of ids; the text's ids have the colours of their tokens."""
    first = int(view.bos)
    ids = (
        _painted(str(token), _TOKENS[(k - first) % 2] if k >= first else _SPECIAL, colour)
        for k, token in enumerate(view.ids[:SHOWN_IDS])
    )
    rest = len(view.ids) - SHOWN_IDS
    return f"   ids [{', '.join(ids)}{f', ... {rest:,} more' if rest > 0 else ''}]"


def _coloured(
    view: DocumentView, tokenizer: TokenizerSpec, shown: int, found: str
) -> list[tuple[str, str]]:
    """Return the first `shown` characters as (text, style) pieces, one or more a token."""
    body = view.ids[int(view.bos) : len(view.ids) - int(view.eos)]
    body = body[: 4 * shown]  # a token has a byte at least, a character has four at most
    texts = token_texts(tokenizer, body, token_bytes(tokenizer))
    special = set(tokenizer.special_tokens.values())
    marks = [m.span() for m in re.finditer(re.escape(found), view.text)] if found else []
    runs = [(0, len(view.ids))] if view.trained is UNSET else view.trained
    trained = {k for start, stop in runs for k in range(start - view.bos, stop - view.bos)}
    pieces: list[tuple[str, str]] = []
    at = 0
    for k, (token, text) in enumerate(zip(body, texts, strict=True)):
        style = _SPECIAL if token in special else _TOKENS[k % 2]
        style = style if k in trained else _SOFT
        for cut in _cuts(text[: max(0, shown - at)], at, marks):
            pieces.append((cut[0], _FOUND if cut[1] else style))
        at += len(text)
    return pieces


def _cuts(text: str, at: int, marks: Sequence[tuple[int, int]]) -> list[tuple[str, bool]]:
    """Cut a token's text where marked stretches begin and end: (text, marked) pieces."""
    inside = [(max(a, at), min(b, at + len(text))) for a, b in marks if a < at + len(text) > at < b]
    pieces, last = [], at
    for low, high in inside:
        pieces += [(text[last - at : low - at], False), (text[low - at : high - at], True)]
        last = high
    return [piece for piece in [*pieces, (text[last - at :], False)] if piece[0]]


def _lines(pieces: Sequence[tuple[str, str]]) -> list[str]:
    """Return (text, style) pieces as lines, control characters escaped and each piece painted."""
    lines = [""]
    for text, style in pieces:
        first, *rest = text.split("\n")
        lines[-1] += _painted(printable(first), style, bool(style))
        lines += [_painted(printable(line), style, bool(style)) for line in rest]
    return lines


def _painted(text: str, style: str, colour: bool) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if colour and text else text


def _rank(row: RowView) -> str:
    rank = "" if row.rank is UNSET else f", rank {row.rank}"
    return rank + ("" if row.micro_batch is UNSET else f", micro-batch {row.micro_batch}")
