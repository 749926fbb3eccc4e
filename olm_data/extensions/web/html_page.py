"""HTML: a file is one document, the main text of its page, found by resiliparse.

    bytes --charset of HTTP, of the page, or detected--> text --HTMLTree--> main text, title

A page with bytes that are not of its charset goes the way of text that is not UTF-8 where they are
in its main text: see `--on-invalid`. Extraction takes time with the square of the depth, so deeply
nested pages are dropped.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from olm_data.dataset.inputs import InputFile, ReadOptions
from olm_data.sources.row_format import InputFormat
from olm_data.sources.rows import NoRow, Row

MOST_BYTES = 64 << 20
"""Bytes of a page."""

MOST_DEPTH = 512
_DEEP = ">".join("*" * MOST_DEPTH)
_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([\w.:-]+)", re.IGNORECASE)
_HEAD = 1024


class Html(InputFormat):
    """Files of HTML; columns: id (the file's path), title."""

    packages = ("resiliparse",)

    def records(
        self, file: BinaryIO, input: InputFile, options: ReadOptions
    ) -> Iterator[Row | NoRow]:
        """Yield the one record of a file."""
        page = extracted(file.read(MOST_BYTES + 1), None)
        if isinstance(page, NoRow):
            yield page
        else:
            yield {"id": input.path, "title": page.title, options.text_column: page.text}


class Extracted(NamedTuple):
    """What is taken from a page; the text is bytes if some of the page's could not be decoded."""

    title: str | None
    text: str | bytes


def extracted(data: bytes, charset: str | None) -> Extracted | NoRow:
    """Return the title and the main text of a page.

    Args:
        data: the page.
        charset: what HTTP says it is.
    """
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    if len(data) > MOST_BYTES:
        return NoRow("malformed", f"a page of more than {MOST_BYTES:,} bytes", data)
    html, exact = _decoded(data, charset)
    tree = HTMLTree.parse(html)
    if tree.document and tree.document.query_selector(_DEEP) is not None:
        return NoRow("malformed", f"elements nested more than {MOST_DEPTH} deep", data)
    text: str | bytes = extract_plain_text(tree, main_content=True)
    if not exact:
        text = str(text).encode().replace("\ufffd".encode(), b"\xff")
    return Extracted(tree.title or None, text)


def _decoded(data: bytes, charset: str | None) -> tuple[str, bool]:
    """Return the page as text, and whether all of it could be decoded."""
    from resiliparse.parse.encoding import detect_encoding

    named = _CHARSET.search(data[:_HEAD])
    said = [charset, named and named[1].decode("ascii", "ignore")]
    if data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        said = ["utf-8-sig" if data.startswith(codecs.BOM_UTF8) else "utf-16"]
    known = [name for name in said if name and _is_text(name)]
    for name in dict.fromkeys([*known, "utf-8"]):
        try:
            return data.decode(name), True
        except UnicodeError:
            continue
    name = known[0] if known else str(detect_encoding(data))
    text = data.decode(name, errors="replace")
    return text, bool(not known and "\ufffd" not in text)


def _is_text(name: str) -> bool:
    """Whether Python has a codec of this name that makes text of bytes."""
    try:
        return bool(codecs.lookup(name)._is_text_encoding)
    except LookupError:
        return False


PAGE = Html()
