"""Strings in text that spell a special token: found, counted, and kept out of document bodies.

    data, offsets -> Scanner.hits -> how many, and in which documents
    tokenizer     -> special_ids  -> the ids that plain text never becomes (see `base.count_ids`)

The scan costs one substring search a group of tokens that begin alike (nearly always one group,
`<|`) and a regular expression only where the beginning occurs at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from olm_data.tokenizer.tokenizer import TokenizerSpec

SCAN_BYTES = 1 << 17  # looked at at once: with its masks it stays in the processor's cache


class Scanner:
    """Finds the strings that spell special tokens in a buffer of documents."""

    def __init__(self, tokens: Iterable[str]) -> None:
        groups: dict[bytes, list[bytes]] = {}
        for token in tokens:
            spelled = token.encode()
            if spelled:
                groups.setdefault(spelled[:2], []).append(spelled)
        self._groups = [
            (prefix, re.compile(b"|".join(map(re.escape, sorted(group, key=len, reverse=True)))))
            for prefix, group in sorted(groups.items())
        ]

    def hits(self, data: np.ndarray, offsets: np.ndarray) -> list[tuple[int, str]]:
        """Return (document, token) of each hit, document by document within a group of tokens.

        Args:
            data: uint8[n], UTF-8 of the documents, concatenated.
            offsets: int64[d + 1], rising from 0 to n.
        """
        found: list[tuple[int, str]] = []
        for prefix, pattern in self._groups:
            if not _occurs(prefix, data):
                continue
            text, place = data.tobytes(), 0
            while match := pattern.search(text, place):
                document = int(np.searchsorted(offsets, match.start(), side="right")) - 1
                stop = int(offsets[document + 1])
                if (
                    match.end() > stop
                ):  # it goes on into the next document, so look again up to here
                    match = pattern.search(text, match.start(), stop)
                if match:
                    found.append((document, match.group().decode()))
                place = match.end() if match else stop
        return found


def _occurs(prefix: bytes, data: np.ndarray) -> bool:
    """Whether one or two bytes occur in uint8[n]; several times as fast as `in` on bytes."""
    for start in range(0, len(data), SCAN_BYTES):
        part = data[start : start + SCAN_BYTES + 1]  # one more: a pair may lie across
        found = part == prefix[0]
        if len(prefix) == 2:
            found = found[:-1] & (part[1:] == prefix[1])
        if found.any():
            return True
    return False


def special_ids(tokenizer: TokenizerSpec) -> np.ndarray:
    """Return the ids (uint32, ascending) that never occur in a document body in "plain" mode.

    The unknown token is left out: it is what some tokenizers make of ordinary text.
    """
    ids = {i for i in tokenizer.special_tokens.values() if i != tokenizer.unk}
    ids |= {i for i in (tokenizer.eos, tokenizer.bos) if i is not None}
    return np.array(sorted(ids), dtype=np.uint32)
