"""The encoder protocol, and its buffers: text in, token ids out.

An encoder plug-in turns text into the ids of document bodies. It adds no BOS and no EOS, truncates
and pads nothing, and works on one thread. `TextEncoder` wraps a plug-in with what holds for all of
them: what is not proved goes to the reference, strings that spell a special token are counted and
treated as `--special` says, and no id of a special token is let through in "plain" mode.

    data uint8[n], offsets int64[d + 1]  ->  Encoder.encode  ->  ids uint32[t], offsets int64[d + 1]
    bytes of documents -> concatenate        chosen_of, merged: taken apart and put together

Also: how the ids that two encoders give differ.

Also: strings in text that spell a special token: found, counted, and kept out of document bodies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from olm_data.tokenizer.tokenizer import TokenizerSpec

Texts = tuple[np.ndarray, np.ndarray]
"""UTF-8 of documents, concatenated, uint8[n], and their offsets int64[d + 1]."""

Ids = tuple[np.ndarray, np.ndarray]
"""ids of documents, concatenated, uint32[t], and their offsets int64[d + 1]."""


class Encoder(Protocol):
    """A way to turn text into ids: `hf` (the reference) or `gigatoken`."""

    name: str

    def encode(self, data: np.ndarray, offsets: np.ndarray) -> Ids:
        """Encode documents.

        Args:
            data: uint8[n], valid UTF-8 of the documents, concatenated.
            offsets: int64[d + 1], rising from 0 to n.

        Returns:
            ids uint32[t] and their offsets int64[d + 1], rising from 0 to t; bodies only.

        Raises:
            Unencodable: some documents cannot be encoded; the others can.
        """
        ...


class Unencodable(Exception):
    """Documents of a batch that an encoder cannot encode.

    Attributes:
        why: document -> reason.
    """

    def __init__(self, why: Mapping[int, str]) -> None:
        super().__init__(f"{len(why)} documents: {next(iter(why.values()))}")
        self.why = why


class Encoded(NamedTuple):
    """Token ids of a batch of documents.

    Attributes:
        ids: uint32[t], document bodies one after another.
        offsets: int64[d + 1], rising from 0 to t.
        special_hits: number of strings in the text that spell a special token.
        unknown: int64[d], unknown tokens of each document.
        failed: document -> why it cannot be encoded; it has no ids.
        by_reference: documents that were given to the reference as nothing is proved of them.
        trained: bool[t], which ids are trained; None: all are.
        cut: int64[d], parts of each document left out for its length; None: nothing was.
        reasons: document that failed -> why, as a key of `DROP_REASONS`; else `unencodable`.
    """

    ids: np.ndarray
    offsets: np.ndarray
    special_hits: int
    unknown: np.ndarray
    failed: Mapping[int, str]
    by_reference: int
    trained: np.ndarray | None = None
    cut: np.ndarray | None = None
    reasons: Mapping[int, str] = {}


def concatenate(texts: Iterable[bytes]) -> Texts:
    """Return the buffers of documents given as bytes."""
    rows = list(texts)
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.frombuffer(b"".join(rows), dtype=np.uint8), offsets


def chosen_of(batch: Texts | Ids, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the chosen documents (bool[d]) of a batch, in order."""
    values, offsets = batch
    lengths = np.diff(offsets)
    ends = np.cumsum(lengths[chosen])
    return values[np.repeat(chosen, lengths)], np.concatenate([np.zeros(1, np.int64), ends])


def merged(chosen: np.ndarray, one: Ids, other: Ids) -> Ids:
    """Return the batch whose documents are those of `one` where `chosen` (bool[d]), of `other`
    elsewhere."""
    lengths = np.zeros(len(chosen), np.int64)
    lengths[chosen], lengths[~chosen] = np.diff(one[1]), np.diff(other[1])
    ids = np.empty(int(lengths.sum()), np.uint32)
    mine = np.repeat(chosen, lengths)
    ids[mine], ids[~mine] = one[0], other[0]
    return ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def ids_of(made: Ids, k: int) -> np.ndarray:
    """Return the ids of document k."""
    ids, offsets = made
    return ids[offsets[k] : offsets[k + 1]]


def count_ids(made: Ids, wanted: np.ndarray) -> np.ndarray:
    """Return how many of the ids of each document are among `wanted` (uint32, ascending): int64[d].

    The wanted ids are few and mostly above all others, so the largest id is nearly always all there
    is to look at.
    """
    ids, offsets = made
    counts = np.zeros(len(offsets) - 1, np.int64)
    if len(wanted) and len(ids) and ids.max() >= wanted[0]:
        at = np.flatnonzero((ids >= wanted[0]) & (ids <= wanted[-1]))
        at = at[np.isin(ids[at], wanted)] if len(at) else at
        np.add.at(counts, np.searchsorted(offsets, at, side="right") - 1, 1)
    return counts


def differences(wanted: Ids, got: Ids) -> list[int]:
    """Return which documents have other ids in `got`; all where not even their number agrees."""
    documents = len(wanted[1]) - 1
    if len(got[1]) != len(wanted[1]):
        return list(range(documents))
    if np.array_equal(wanted[1], got[1]) and np.array_equal(wanted[0], got[0]):
        return []
    return [
        k for k in range(documents) if not np.array_equal(ids_of(wanted, k), ids_of(got, k))
    ] or list(range(documents))


def compare(wanted: Ids, got: Ids) -> str:
    """Return "" where both are the same, or a sentence naming the first difference."""
    differ = differences(wanted, got)
    if not differ:
        return ""
    k = differ[0]
    if len(got[1]) != len(wanted[1]):
        return f"{len(got[1]) - 1} documents, not {len(wanted[1]) - 1}"
    one, other = ids_of(wanted, k), ids_of(got, k)
    if np.array_equal(one, other):
        return "the offsets of the documents differ"
    return f"document {k} of the sample: {first_difference(one, other)}"


def first_difference(wanted: np.ndarray, got: np.ndarray) -> str:
    """Say in words where two rows of ids part."""
    common = min(len(wanted), len(got))
    differ = np.flatnonzero(wanted[:common] != got[:common])
    if len(differ):
        at = int(differ[0])
        return f"token {at} is {int(got[at])}, not {int(wanted[at])}"
    return f"{len(got)} tokens, not {len(wanted)}"


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
