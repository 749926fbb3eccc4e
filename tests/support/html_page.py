"""What a reader sees of an HTML page, and what a browser would fetch for it."""

from __future__ import annotations

from html.parser import HTMLParser


class HtmlPage(HTMLParser):
    """A page; what its scripts hold is no text of it.

    Attributes:
        text: pieces of text, in order.
        fetched: what it refers to outside itself.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.text: list[str] = []
        self._script = False
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._script = tag == "script"
        for name, value in attrs:
            inside = (value or "").startswith(("#", "data:,"))
            if name in ("src", "href", "xlink:href") and not inside:
                self.fetched.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if not self._script:
            self.text.append(data)
