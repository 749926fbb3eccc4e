"""The parts of our HTML pages: one self-contained file, light and dark, wide and narrow.

    facts + sections (text, tables, pictures as inline SVG) -> write_page -> one .html file

A page fetches nothing, runs nothing, and follows the reader's light or dark setting; pictures take
their lines and letters in the page's colour. All text given is escaped here.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olm_data.errors import printable, shown
from olm_data.extras import needs
from olm_data.storage.places import refuse_no_file
from olm_data.storage.store import io_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

COLOURS = ("#3f7fe8", "#e07b39", "#3a9d6e", "#b0489c", "#7a6ff0", "#c2a21b", "#4fb3bf", "#c94f4f")
_INK = "#010203"  # stands for the page's text colour while matplotlib draws


def colours() -> Iterator[str]:
    """Return the colours, again and again."""
    return cycle(COLOURS)


def write_page(
    output: str, title: str, facts: Sequence[tuple[str, str]], sections: Sequence[str]
) -> Path:
    """Write a page, replacing the file as a whole.

    Args:
        output: path of the HTML file.
        facts: (name, value) pairs shown first; those of an empty value are left out.
        sections: what `section` returned; empty ones are left out.

    Returns:
        the path written.

    Raises:
        ResourceError: the folder does not exist or may not be written.
        UsageError: the name is empty or is a folder's.
    """
    refuse_no_file(output, "the page")
    cells = (
        f"<div><b>{_escaped(value)}</b><span>{_escaped(name)}</span></div>"
        for name, value in facts
        if value
    )
    page = _PAGE.format(
        title=_escaped(title),
        facts="".join(cells),
        body="\n".join(part for part in sections if part),
    )
    path = Path(output)
    unfinished = path.with_name(path.name + ".unfinished")
    with io_errors(output, writing=True):
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(path)
    return path


def _escaped(text: str) -> str:
    """Return foreign text as HTML: no mark-up of it acts, no control or bidi character stays."""
    return html.escape(shown(text))


def section(title: str, body: str) -> str:
    """Return a section of a page; `body` is HTML."""
    return f"<section><h2>{_escaped(title)}</h2>{body}</section>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int = 0) -> str:
    """Return a table.

    Args:
        head: names of the columns.
        rows: cells of each row, as plain text.
        numbers: how many columns at the right hold numbers, which stand at the right.
    """
    first = len(head) - numbers

    def cell(i: int, text: str) -> str:
        name = _escaped(head[i])  # a narrow page shows it beside the value
        number = " class=number" if i >= first else ""
        return f'<td{number} data-name="{name}">{_escaped(text)}</td>'

    names = (
        f'<th scope="col"{" class=number" if i >= first else ""}>{_escaped(name)}</th>'
        for i, name in enumerate(head)
    )
    body = "".join(f"<tr>{''.join(cell(i, c) for i, c in enumerate(row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{"".join(names)}</tr>{body}</table></div>'


def note(text: str) -> str:
    """Return a short remark."""
    return f'<p class="note">{_escaped(text)}</p>'


def svg(draw: Callable[[Axes], None], alt: str, *, width: float = 9.0, height: float = 3.2) -> str:
    """Return a picture as an SVG element; fonts and ink are the page's.

    Args:
        draw: draws into the axes it is given.
        alt: what the picture says, in words, for those who do not see it.
        width, height: inches at 72 points.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    with needs("the report"):
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
        from matplotlib.text import Text

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "olm", "font.size": 9}
    settings["text.parse_math"] = False  # a $ in a name is a $
    for name in ("text.", "axes.label", "axes.edge", "xtick.", "ytick.", "grid."):
        settings[f"{name}color"] = _INK
    with mpl.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2, linewidth=0.6)
        axes.set_axisbelow(True)
        draw(axes)
        _plain_powers(axes)
        for label in figure.findobj(Text):
            label.set_text(printable(label.get_text()))
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue().replace(_INK, "currentColor")
    text = "\n".join(map(printable, text.split("\n")))
    drawn = text[text.index("<svg") :].replace(
        "<svg", f'<svg role="img" aria-label="{_escaped(alt)}"', 1
    )
    return f'<div class="figure">{drawn}</div>'


def _plain_powers(axes: Axes) -> None:
    """Label logarithmic axes by numbers: by default matplotlib writes formulas there."""
    from matplotlib.ticker import FuncFormatter, LogFormatter, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(axis.get_major_formatter(), LogFormatter):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())


def whole_numbers(axis: Axis) -> None:
    """Let an axis of counts have ticks at integers only, written with thousands."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --page: #f5f6f8; --card: #fff; --ink: #1d2430; --soft: #5c667a;
  --line: #e2e5ea; --mark: #2f6fdb; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #14171c; --card: #1c2027; --ink: #e3e7ee; --soft: #9aa5b8; --line: #323843;
    --mark: #7fb0ff; }}
}}
body {{ margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }}
main {{ max-width: 960px; margin: 0 auto; padding: 24px 16px 64px; }}
h1 {{ font-size: 22px; margin: 8px 0 16px; overflow-wrap: anywhere; }}
h2 {{ font-size: 17px; margin: 0 0 12px; }}
h3 {{ font-size: 14px; margin: 16px 0 4px; overflow-wrap: anywhere; }}
section, .facts {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px; margin: 0 0 16px; }}
.facts {{ display: flex; flex-wrap: wrap; gap: 10px 34px; }}
.facts b {{ display: block; font-size: 18px; }}
.facts span {{ color: var(--soft); font-size: 13px; }}
svg {{ max-width: 100%; height: auto; font-family: system-ui, "DejaVu Sans", sans-serif; }}
.pair {{ display: flex; flex-wrap: wrap; gap: 12px; }}
.pair .figure {{ flex: 1 1 320px; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13.5px; margin-top: 8px; }}
th {{ text-align: left; color: var(--soft); font-weight: 600; }}
th, td {{ padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
.number:last-child {{ padding-right: 0; }}
pre {{ background: var(--page); border-radius: 8px; padding: 10px 14px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace;
  margin: 4px 0 0; }}
.strip {{ display: flex; height: 14px; border-radius: 4px; overflow: hidden; margin: 6px 0; }}
.strip i {{ flex: 1 1 0; min-width: 1px; }}
.bars {{ width: 30%; min-width: 120px; }}
.bar {{ display: block; height: 6px; border-radius: 2px; min-width: 1px; }}
.prompt {{ color: var(--mark); }}
.note {{ color: var(--soft); font-size: 13px; margin: 6px 0 0; }}
@media (max-width: 600px) {{
  section, .facts {{ padding: 14px 12px; }}
  .facts {{ gap: 10px 22px; }}
  tr {{ display: block; padding: 8px 0; border-bottom: 1px solid var(--line); }}
  tr:has(> th) {{ display: none; }}
  td {{ display: flex; justify-content: space-between; gap: 16px; padding: 2px 0 !important;
    border: 0; white-space: normal; overflow-wrap: anywhere; text-align: right; }}
  td::before {{ content: attr(data-name); color: var(--soft); text-align: left; flex: none; }}
  td[data-name=""] {{ font-weight: 600; text-align: left; }}
  td.bars {{ width: auto; display: block; }}
  .figure {{ overflow-x: auto; }}
  .figure svg {{ min-width: 620px; }}
  .pair .figure svg {{ min-width: 0; }}
}}
</style>
</head>
<body><main>
<h1>{title}</h1>
<div class="facts">{facts}</div>
{body}
</main></body>
</html>
"""
