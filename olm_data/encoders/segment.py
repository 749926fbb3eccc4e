"""Safe cuts in long documents: pieces whose ids, joined, are the ids of the whole document.

The reference library needs memory in proportion to the text it is given at once (about 100 bytes
a token), so a very long document is encoded in pieces. A place is a candidate where an ASCII letter
is followed by a space and another ASCII letter: every pre-tokenizer in use ends a pre-token there.
A candidate becomes a cut only if the tokenizer itself shows it on the text around it:
ids(left + right) == ids(left) + ids(right). A stretch without a proven cut (a megabyte of one
character) stays in one piece.

    start -> look for candidates from start + target on -> prove one -> cut -> next piece
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

TARGET_BYTES = 1 << 20  # pieces are about this long; longer documents are cut
WINDOW_BYTES = 256  # text on each side of a candidate that has to agree
TRIES = 16  # candidates tried before the piece is made longer by another TARGET_BYTES

_CANDIDATE = re.compile(rb"[A-Za-z](?= [A-Za-z])")

Encode = Callable[[str], list[int] | None]


def pieces(text: memoryview, encode: Encode, target: int = TARGET_BYTES) -> Iterator[bytes]:
    """Cut one document's UTF-8 into pieces that encode independently.

    Args:
        text: the UTF-8 bytes.
        encode: ids of a short text, or None where there are none: nothing is proved there.
        target: wanted bytes of a piece.

    Yields:
        the pieces in order; their concatenation is `text`.
    """
    start, total = 0, len(text)
    look = target
    while total - start > look:
        cut = _proven_cut(text, start, start + look, min(start + look + target, total), encode)
        if cut is None:
            look += target
            continue
        yield bytes(text[start:cut])
        start, look = cut, target
    yield bytes(text[start:])


def _proven_cut(text: memoryview, start: int, low: int, high: int, encode: Encode) -> int | None:
    for tried, match in enumerate(_CANDIDATE.finditer(text, low, high)):
        if tried == TRIES:
            return None
        cut = match.end()
        left = _whole_characters(bytes(text[max(start, cut - WINDOW_BYTES) : cut]))
        right = _whole_characters(bytes(text[cut : cut + WINDOW_BYTES]))
        whole, one, other = encode(left + right), encode(left), encode(right)
        if one is not None and other is not None and whole == one + other:
            return cut
    return None


def _whole_characters(window: bytes) -> str:
    """Decode a window of valid UTF-8, without the characters that its ends cut."""
    return window.decode(errors="ignore")
