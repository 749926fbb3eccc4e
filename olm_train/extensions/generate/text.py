"""Ids to text while it is being written: whole characters, and where a stop string ends it.

    ids, one by one -> TextStream -> new text -> Stops -> what can be shown already

The pieces put together are the text of all ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BEFORE = 6
"""Ids of the prompt that are decoded along: some tokenizers write a word otherwise at the start."""
_UNFINISHED = "\ufffd"


class TextStream:
    """Text of the ids after a prompt.

    Args:
        tokenizer: of the model.
        prompt: ids before the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-BEFORE:])
        read = len(self._ids)
        self._known = self._decode(self._ids)
        while read and self._known.endswith(_UNFINISHED):
            read -= 1
            self._known = self._decode(self._ids[:read])
        self._read = read  # of `_ids`, those whose text is known

    def push(self, token: int) -> str:
        """Return the text that another id has made certain; empty within a character."""
        self._ids.append(token)
        text = self._decode(self._ids)
        return "" if text.endswith(_UNFINISHED) else self._take(text)

    def flush(self) -> str:
        """Return what is left at the end, with a mark for half a character."""
        return self._take(self._decode(self._ids))

    def _take(self, text: str) -> str:
        new = text[len(self._known) :]
        if new:
            self._ids = self._ids[self._read :]
            self._known, self._read = self._decode(self._ids), len(self._ids)
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class Stops:
    """A growing text, cut off before the first stop string in it.

    Attributes:
        text: so far, cut off once `ended`.
        ended: a stop string was found.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self.text, self.ended = "", False

    def push(self, new: str) -> None:
        """Add text to the end."""
        begin = max(0, len(self.text) + 1 - max(map(len, self._stops), default=0))
        self.text += new
        found = [self.text.find(stop, begin) for stop in self._stops] if new else []
        places = [place for place in found if place >= 0]
        if places:
            self.text, self.ended = self.text[: min(places)], True

    @property
    def certain(self) -> int:
        """Characters that will stay, whatever comes."""
        if self.ended:
            return len(self.text)
        held = max((_overlap(self.text, stop) for stop in self._stops), default=0)
        return len(self.text) - held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text begin a stop string."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
