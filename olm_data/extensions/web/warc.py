"""WARC: of the responses that are HTML, the main text, as `html_page` finds it.

    archive --fastwarc--> records, one at a time --response? HTML?--> a document each
                                                 --else--> skipped, counted as `no_html`

An archive that holds something between two records is damaged, as other files are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

from olm_data.dataset.inputs import InputFile, ReadOptions
from olm_data.extensions.web.html_page import MOST_BYTES, extracted
from olm_data.sources.row_format import InputFormat
from olm_data.sources.rows import NoRow, Row

_HTML = ("text/html", "application/xhtml+xml")


class Warc(InputFormat):
    """WARC files; columns: id (of the record), url, date, title."""

    packages = ("fastwarc", "resiliparse")

    def records(
        self, file: BinaryIO, input: InputFile, options: ReadOptions
    ) -> Iterator[Row | NoRow]:
        """Yield what each record of the archive is."""
        from fastwarc.warc import ArchiveIterator

        stream: Any = _Forward(file)
        for record in ArchiveIterator(stream, parse_http=False, stream_detect=False):
            yield _row(record, options.text_column)


class _Forward:
    """A file that is read from the start on; fastwarc would go back in one that says it can."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._place = file, 0

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self._place += len(data)
        return data

    def tell(self) -> int:
        return self._place


def _row(record: Any, text_column: str) -> Row | NoRow:
    from fastwarc.warc import WarcRecordType

    if not record.headers.get("WARC-Type"):
        return NoRow("malformed", "the archive ends within the head of a record")
    if record.record_type != WarcRecordType.response or not record.is_http:
        return NoRow("no_html")
    url, size = record.headers.get("WARC-Target-URI"), record.content_length
    block = record.reader.read(size) if size <= MOST_BYTES else b""
    if len(block) < size:
        why = f"over {MOST_BYTES:,} bytes" if size > MOST_BYTES else "its end is missing"
        return NoRow("malformed", f"{url}: {why}", block)
    try:
        record.set_bytes_content(block)
        record.parse_http(auto_decode="all")
        if record.http_content_type not in _HTML:
            return NoRow("no_html")
        data = record.reader.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        return NoRow("malformed", f"{url}: {error}", block)
    page = extracted(data, record.http_charset)
    if isinstance(page, NoRow):
        return page
    date = record.record_date and record.record_date.isoformat()
    columns = {"id": record.record_id, "url": url, "date": date, "title": page.title}
    return {**columns, text_column: page.text}


ARCHIVE = Warc()
