"""What commands print of a result: one look for all of them.

    result --emit--> its fields as JSON | as lines for people, on standard output
    lines(result)    `name  value` a field; lists of Structs below as tables, Structs as blocks
    table(rows)      a line a Struct, a column a field
    record(values)   `name  value`, a line each
    cells(rows)      the same as `table`, for pages
    as_html(values)  the same lines, for notebooks

How a number is shown stands at the field's type: `Share`, `Loss`, ... A Struct with tables of its
own says in `COLUMNS` how they look. On the terminal a column or line without a value, or of 0, is
left out. Lines fit it; without one nothing is cut or broken.
"""

from __future__ import annotations

import html
import json
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import click
import msgspec
from rich.cells import cell_len, set_cell_size

from olm_data.counts import duration
from olm_data.errors import printable
from olm_data.redaction import redacted

WITHOUT_TERMINAL = 1 << 16
LEAST_NAME, MOST_NAME = 12, 60
"""Cells of a terminal that a name is cut to."""

Share = Annotated[float, msgspec.Meta(extra={"shown": ".4%"})]
Loss = Annotated[float, msgspec.Meta(extra={"shown": ".4f"})]
ShareError = Annotated[float, msgspec.Meta(extra={"shown": "+.4%"})]
Change = Annotated[float, msgspec.Meta(extra={"shown": "+.4f"})]
Excess = Annotated[float, msgspec.Meta(extra={"shown": "+.1f"})]
Mean = Annotated[float, msgspec.Meta(extra={"shown": ",.2f"})]
Seconds = Annotated[float, msgspec.Meta(extra={"shown": "s"})]
Difference = Annotated[int, msgspec.Meta(extra={"shown": "+,"})]
Ordinal = Annotated[int, msgspec.Meta(extra={"shown": "d"})]
"""Types of fields, by how they are shown."""


class Columns(NamedTuple):
    """How a field of a result is shown as a table.

    Attributes:
        names: as of `cells`.
        total: add a row of sums.
        most: rows shown; the others are counted. 0: all.
        name: of the field, for people.
    """

    names: tuple[str, ...] = ()
    total: bool = False
    most: int = 0
    name: str = ""


def emit(result: Any, as_json: bool, shown: Iterable[str] | None = None) -> None:
    """Print a result: its fields as JSON, or lines; no secret, escape or line break in one acts.

    Args:
        shown: None: `lines(result)`.
    """
    if as_json:
        print_json(result)
    else:
        for line in _safe(lines(result) if shown is None else shown):
            click.echo(line)


def as_html(values: Mapping[str, object]) -> str:
    """Return named values as notebooks show them: a `record`, escaped, which fetches nothing."""
    text = "\n".join(_safe(record(values, indent="", width=WITHOUT_TERMINAL)))
    return f'<pre style="white-space: pre; overflow-x: auto">{html.escape(text)}</pre>'


def _safe(texts: Iterable[str]) -> Iterator[str]:
    return (printable(redacted(line)) for line in texts)


def lines(result: Any, *, indent: str = "", width: int = 0) -> list[str]:
    """Return a Struct as lines: a line a field, then a block of each that holds Structs.

    Args:
        result: its class may have `COLUMNS`: of fields, how they are shown, None: not at all.
        width: cells of the terminal; 0: those it has.
    """
    own: Mapping[str, Columns | None] = getattr(result, "COLUMNS", {})
    facts, blocks, below = dict[str, object](), list[str](), indent + "  "
    for field, form in _forms(result.__class__).items():
        value, columns = getattr(result, field), own.get(field, Columns())
        if columns is None:
            continue
        name = columns.name or field.replace("_", " ")
        first = next(iter(value), None) if isinstance(value, (list, tuple)) else value
        if not isinstance(first, msgspec.Struct):
            facts[name] = _texts(value, form, columns.most)
            continue
        blocks.append(indent + name)
        if value is first:
            blocks += lines(value, indent=below, width=width)
            continue
        rows = value[: columns.most or None]
        if not columns.names and any(map(_holds_structs, rows)):
            blocks += (line for row in rows for line in lines(row, indent=below, width=width))
            continue
        blocks += table(rows, *columns.names, total=columns.total, indent=below, width=width)
        if len(rows) < len(value):
            blocks.append(f"{below}and {len(value) - len(rows):,} more (--json shows all)")
    return record(facts, indent=indent, width=width) + blocks


def _holds_structs(row: msgspec.Struct) -> bool:
    values = (getattr(row, field) for field in _forms(row.__class__))
    return any(
        isinstance(value, list) and isinstance(value[0], msgspec.Struct)
        for value in values
        if value
    )


def _texts(value: object, form: str, most: int) -> object:
    """Return the text of a value, or a list of one for each line of it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping) and (most or {type(one) for one in value.values()} != {int}):
        value = [f"{name}: {cell(one)}" for name, one in value.items()]
    if isinstance(value, (list, tuple)) and all(isinstance(one, (str, tuple)) for one in value):
        rest = len(value) - most if most else 0
        more = [f"and {rest:,} more (--json shows all)"] * (rest > 0)
        return [*map(cell, value[: most or None]), *more]
    return value if value is msgspec.UNSET else value and cell(value, form)


def print_json(result: object) -> None:
    """Print the result of a command as one JSON value.

    Args:
        result: a Struct or dataclass, a list of them, or an object of them; an iterator becomes a
            list.
    """
    click.echo(json.dumps(msgspec.to_builtins(result, enc_hook=_listed), indent=1))


def _listed(value: object) -> object:
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value)} is not for JSON")


def terminal_width() -> int:
    """Return the columns of the terminal; without one more than any line has."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WITHOUT_TERMINAL


def cell(value: object, form: str = "") -> str:
    """Return a value as a table shows it; "" for none.

    Args:
        form: of numbers, as of `format`; otherwise thousands have commas, floats four digits.
    """
    if value is None or value is msgspec.UNSET or value is False:
        return ""
    if value is True:
        return "yes"
    if isinstance(value, msgspec.Struct):
        texts = {
            name: cell(getattr(value, name), own) for name, own in _forms(value.__class__).items()
        }
        return ", ".join(
            f"{name.replace('_', ' ')} {text}"
            for name, text in texts.items()
            if text not in ("", "0")
        )
    if isinstance(value, (int, float)):
        if form == "s":
            return duration(value)
        form = form or ("," if isinstance(value, int) else ".4g")
        return format(value, form) if value else "0"
    if isinstance(value, Mapping):
        return ", ".join(f"{cell(number)} {name}" for name, number in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(
            f"({cell(one)})" if isinstance(one, tuple) else cell(one, form) for one in value
        )
    return printable(str(value))


class Cells(NamedTuple):
    """A table as text: names of the columns, its rows, and which columns stand at the left."""

    head: list[str]
    rows: list[list[str]]
    left: list[int]


@cache
def _forms(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return how the numbers of each field of a Struct are shown."""
    forms = {}
    hints = get_type_hints(kind, include_extras=True)
    for name in kind.__struct_fields__:
        hint = hints[name]
        metas = [m for part in (hint, *get_args(hint)) for m in getattr(part, "__metadata__", ())]
        extras = [getattr(meta, "extra", None) or {} for meta in metas]
        forms[name] = next((extra["shown"] for extra in extras if "shown" in extra), "")
    return forms


def cells(rows: Sequence[Any], *columns: str, total: bool = False) -> Cells:
    """Return Structs of one kind as the cells of a table.

    Args:
        columns: fields, each as `field` or `field=head`; none: all. A head without a field has
            `_` as spaces.
        total: add a row with the sums of whole numbers, but for ordinals.
    """
    forms = _forms(rows[0].__class__) if rows else dict[str, str]()
    heads, shown_columns, left = [], [], []
    for number, column in enumerate(columns or forms):
        name, _, head = column.partition("=")
        values = [getattr(row, name) for row in rows]
        form, kinds = forms.get(name, ""), {type(value) for value in values}
        texts = [cell(value, form) for value in values]
        if total:
            summed = kinds == {int} and form != "d"
            texts.append(cell(sum(values), form) if summed else "" if number else "total")
        if not number or not kinds <= _NUMBERS:
            left.append(number)
        heads.append(head or name.replace("_", " "))
        shown_columns.append(texts)
    return Cells(heads, [list(row) for row in zip(*shown_columns, strict=True)], left)


_NUMBERS = {int, float, type(None), msgspec.UnsetType}


def table(
    rows: Sequence[Any], *columns: str, total: bool = False, indent: str = "", width: int = 0
) -> list[str]:
    """Return Structs as lines, a head and one each; blocks of lines where those are too wide.

    Args:
        columns, total: as of `cells`.
        width: cells of the terminal; 0: those it has.
    """
    found = cells(rows, *columns, total=total)
    return fitted(found.head, found.rows, left=found.left, indent=indent, width=width)


def fitted(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    indent: str = "",
    width: int = 0,
) -> list[str]:
    """Return a table of text as lines; arguments as of `table` and `aligned`."""
    if not rows:
        return []
    kept = [k for k in range(len(head)) if not k or any(row[k] for row in rows)]
    head, rows = [head[k] for k in kept], [[row[k] for k in kept] for row in rows]
    room = (width or terminal_width()) - len(indent)
    lines = aligned([head, *rows], room, left=[at for at, k in enumerate(kept) if k in left])
    if max(map(cell_len, lines)) > room:
        lines = []
        for name, *others in rows:
            said = (f"{what} {text}" for what, text in zip(head[1:], others, strict=True) if text)
            whole = "; ".join(said).replace(" ", "\xa0").replace(";\xa0", "; ")
            lines += [shortened(name, room)]
            lines += [line.replace("\xa0", " ") for line in wrapped(f"  {whole}", 2, room)]
    return [indent + line for line in lines]


def record(values: Mapping[str, object], *, indent: str = "  ", width: int = 0) -> list[str]:
    """Return named values as lines, one for each text of a list; long lines are broken.

    Args:
        values: those of None, 0, "" and [] are left out.
        width: cells of the terminal; 0: those it has.
    """
    texts = [
        (name, text)
        for name, value in values.items()
        for text in map(cell, value if isinstance(value, list) else [value])
        if value and text
    ]
    size = max((cell_len(name) for name, _ in texts), default=0)
    return [
        line
        for name, text in texts
        for line in wrapped(f"{indent}{name:<{size}}  {text}", len(indent) + size + 2, width)
    ]


def wrapped(line: str, indent: int = 0, width: int = 0) -> list[str]:
    """Return a line broken between words; the lines after the first are indented."""
    return textwrap.wrap(
        line,
        max(width or terminal_width(), indent + 20),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def aligned(
    rows: Sequence[Sequence[str]], width: int | None = None, *, left: Collection[int] = (0,)
) -> list[str]:
    """Return rows of cells as lines without borders.

    Args:
        width: of the lines, about: the middle of a long first cell is left out. None: no limit.
        left: columns that stand at the left; the others stand at the right.
    """
    if not rows:
        return []
    sizes = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        room = width - sum(sizes[1:]) - 2 * len(sizes[1:])
        sizes[0] = min(sizes[0], max(LEAST_NAME, min(room, MOST_NAME)))
    lines = []
    for first, *others in rows:
        parts = []
        for number, (text, size) in enumerate(
            zip((shortened(first, sizes[0]), *others), sizes, strict=True)
        ):
            blank = " " * (size - cell_len(text))
            parts.append(text + blank if number in left else blank + text)
        lines.append("  ".join(parts).rstrip())
    return lines


def shortened(text: str, width: int) -> str:
    """Return text cut in its middle to at most `width` cells of a terminal."""
    if cell_len(text) <= width:
        return text
    left = (width - 1) // 2
    right = set_cell_size(text[::-1], width - 1 - left)[::-1]  # cells from the end
    return f"{set_cell_size(text, left)}\u2026{right}"
