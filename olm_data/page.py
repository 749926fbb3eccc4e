"""Our HTML pages: one self-contained file, light and dark, wide and narrow.

    facts + sections (text, tables, pictures as inline SVG) -> write_page -> one .html file
    templates/page.html, page.css: the page; templates/parts.html: what sections are made of
    templates/run.js, run.css: the part of it that draws training runs

A page fetches nothing, runs no script but ours (its policy names the digest), and follows the
reader's light or dark setting; pictures take their lines and letters in the page's colour. The
templates escape all text.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olm_data.errors import printable, shown
from olm_data.extras import needs
from olm_data.printing import cells
from olm_data.storage.disk import io_errors
from olm_data.storage.output_paths import refuse_output

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

COLOURS = ("#3f7fe8", "#e07b39", "#3a9d6e", "#b0489c", "#7a6ff0", "#c2a21b", "#4fb3bf", "#c94f4f")
_WIDE, _NARROW = 9.0, 4.8  # inches, of which a screen of 390 pixels shows a good 5
_INK = "#010203"  # stands for the page's text colour while matplotlib draws


def colours() -> Iterator[str]:
    """Return the colours, again and again."""
    return cycle(COLOURS)


@dataclass(frozen=True)
class Script:
    """The script that draws training runs.

    Attributes:
        text: our JavaScript.
        runs: how many runs it asks a server for; 0: they are in `data`.
        data: JSON in which no character begins a tag; "" for a page that asks a server.
    """

    text: str
    runs: int = 0
    data: str = ""

    def policy(self, *, live: bool = False) -> str:
        """Return the Content-Security-Policy of its page. Args: live: it asks its own server."""
        digest = base64.b64encode(hashlib.sha256(self.text.encode()).digest()).decode()
        parts = [
            "default-src 'none'",
            f"script-src 'sha256-{digest}'",
            "style-src 'unsafe-inline'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
        parts += ["connect-src 'self'", "frame-ancestors 'none'"] if live else []
        return "; ".join(parts)


def run_script(*, runs: int = 0, data: str = "") -> Script:
    """Return the script that draws training runs; see `Script`."""
    environment = _templates()
    assert environment.loader is not None
    return Script(environment.loader.get_source(environment, "run.js")[0], runs, data)


def render_page(
    title: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[str],
    *,
    script: Script | None = None,
) -> str:
    """Return a page; arguments as of `write_page`."""
    return (
        _templates()
        .get_template("page.html")
        .render(
            title=title,
            facts=[fact for fact in facts if fact[1]],
            sections=[section for section in sections if section],
            script=script,
        )
    )


def write_page(
    output: str,
    title: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[str],
    *,
    script: Script | None = None,
) -> Path:
    """Write a page, replacing the file as a whole.

    Args:
        output: path of the HTML file.
        facts: (name, value) pairs shown first; those of an empty value are left out.
        sections: what `section` returned; empty ones are left out.
        script: draws training runs, between facts and sections.

    Returns:
        the path written.

    Raises:
        ResourceError: the folder does not exist or may not be written.
        UsageError: the name is empty or is a folder's.
    """
    refuse_output(output, "the page", "local file")
    page = render_page(title, facts, sections, script=script)
    path = Path(output)
    unfinished = path.with_name(path.name + ".unfinished")
    with io_errors(output, writing=True):
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(path)
    return path


def section(title: str, body: str) -> Markup:
    """Return a section of a page; `body` is made of parts."""
    return part("section", title, body)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int = 0) -> Markup:
    """Return a table.

    Args:
        head: names of the columns.
        rows: cells of each row, as plain text.
        numbers: how many columns at the right hold numbers, which stand at the right.
    """
    return part("table", head, rows, len(head) - numbers)


def fields(rows: Sequence[Any], *columns: str) -> Markup:
    """Return Structs as a table; `columns` as of `printing.cells`."""
    found = cells(rows, *columns)
    return table(found.head, found.rows, numbers=len(found.head) - len(found.left))


def note(text: str) -> Markup:
    """Return a short remark."""
    return part("note", text)


def part(macro: str, *values: Any) -> Markup:
    """Return a part of a page: a macro of `templates/parts.html`, called with values.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    found: Markup = getattr(_templates().get_template("parts.html").module, macro)(*values)
    return found


def joined(parts: Iterable[str]) -> Markup:
    """Return parts one behind the other."""
    return part("all", list(parts))


@cache
def _templates() -> Environment:
    with needs("the report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup, escape

    def said(value: Any) -> Any:
        """Let no control or bidi character of a text stay, and no credential."""
        return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        loader=PackageLoader("olm_data"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=said,
        trim_blocks=True,
    )
    environment.filters["ours"] = Markup
    environment.filters["data"] = lambda text: escape("\n".join(map(printable, text.split("\n"))))
    return environment


def svg(draw: Callable[[Axes], None], alt: str, *, height: float = 3.2) -> Markup:
    """Return a picture as an SVG element; fonts and ink are the page's.

    Args:
        draw: draws into the axes it is given.
        alt: what the picture says, in words, for those who do not see it.
        height: inches at 72 points; the width is 9, and 4.8 for a phone, drawn apart.

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

    def drawn(width: float) -> Markup:
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
        picture = text[text.index("<svg") :]
        named = f'<svg role="img" aria-label="{escape(shown(alt))}"'
        return Markup(picture.replace("<svg", named, 1))  # matplotlib escapes the text it draws

    from markupsafe import Markup, escape

    with mpl.rc_context(settings):
        return part("figure", drawn(_WIDE), drawn(_NARROW))


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
