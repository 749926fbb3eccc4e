"""PDF: a file is one document, the text of its pages with a blank line between two, by pypdf.

A page that cannot be read makes the file a bad record, or with `--on-invalid replace` is U+FFFD.
Pages that are pictures have no text: such a file is dropped as empty, and counted.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import BinaryIO

from olm_data.dataset.inputs import InputFile, ReadOptions
from olm_data.errors import said_by
from olm_data.sources.limits import Expansion
from olm_data.sources.row_format import InputFormat
from olm_data.sources.rows import NoRow, Row

MOST_BYTES = 512 << 20
"""Bytes of a file, which is read whole."""

_BETWEEN = "\n\n"
_BROKEN = b"\xff"  # no UTF-8: `--on-invalid replace` puts U+FFFD in its place


class Pdf(InputFormat):
    """PDF files; columns: id (the path), pages, page_starts (offsets in bytes of the text)."""

    packages = ("pypdf",)

    def records(
        self, file: BinaryIO, input: InputFile, options: ReadOptions
    ) -> Iterator[Row | NoRow]:
        """Yield the one record of a file."""
        data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            yield NoRow("malformed", f"a file of more than {MOST_BYTES:,} bytes", data)
        else:
            yield _row(data, input, options)


def _row(data: bytes, input: InputFile, options: ReadOptions) -> Row | NoRow:
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # what it mends is no error of ours
    expansion = Expansion(input)
    try:
        pages = list(PdfReader(io.BytesIO(data)).pages)
    except Exception as error:  # whatever a damaged file makes it do
        return NoRow("malformed", f"no PDF: {type(error).__name__}: {said_by(error)}", data)
    text, starts = bytearray(), list[int]()
    for number, page in enumerate(pages, 1):
        text += _BETWEEN.encode() if starts else b""
        starts.append(len(text))
        try:
            found = page.extract_text().encode(errors="surrogatepass")
        except Exception as error:
            if options.on_invalid != "replace":
                what = f"page {number}: {type(error).__name__}: {said_by(error)}"
                return NoRow("malformed", what, data)
            found = _BROKEN
        expansion.add(len(found), len(data))
        text += found
    columns = {"id": input.path, "pages": len(pages), "page_starts": starts}
    return {**columns, options.text_column: bytes(text)}


DOCUMENT = Pdf()
