"""Small real files of the formats that libraries read: HTML, WARC, PDF."""

from __future__ import annotations

import io
from collections.abc import Sequence

PAGE = (
    "<html><head><title>{title}</title></head><body><nav><a href='/'>Home</a></nav>"
    "<main><h1>{title}</h1><p>{text}</p></main><script>no()</script></body></html>"
)


def page(text: str, title: str = "A title") -> str:
    """A page with a menu, a heading and a paragraph."""
    return PAGE.format(text=text, title=title)


def record(
    body: bytes, number: int = 0, *, kind: str = "response", http: bool = True, length: int = -1
) -> bytes:
    """A record of an archive."""
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{number}>\r\n"
        f"WARC-Target-URI: http://a.example/{number}\r\nWARC-Date: 2026-01-02T03:04:05Z\r\n"
        f"Content-Type: application/{'http; msgtype=response' if http else 'warc-fields'}\r\n"
        f"Content-Length: {len(body) if length < 0 else length}\r\n\r\n"
    )
    return head.encode() + body + b"\r\n\r\n"


def response(body: bytes, number: int, kind: str = "text/html; charset=utf-8") -> bytes:
    """A record of an answer of a server."""
    return record(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n".encode() + body, number)


def pdf(pages: Sequence[str]) -> bytes:
    """A PDF with a line of text a page, made by pypdf; a page of "" has no text."""
    from pypdf import PdfWriter
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = PdfWriter()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    for text in pages:
        page = writer.add_blank_page(300, 100)
        fonts = DictionaryObject({NameObject("/F1"): font})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 10 50 Td ({text}) Tj ET".encode() if text else b"")
        page[NameObject("/Contents")] = writer._add_object(stream)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()
