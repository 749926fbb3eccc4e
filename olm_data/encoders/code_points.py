"""Sets of code points: found in UTF-8 buffers, and what normalisation may change.

    CodePoints(ranges).documents(data, offsets) -> which documents hold one of them
    unsettled("NFC") -> ranges of the code points that NFC may change, alone or beside others

A text without an unsettled code point is left as it is by every version of Unicode: they are all
that may change, combine or move, and all that this Python's Unicode does not know, so that a code
point which a newer version gives a meaning is among them. (Unicode's stability policy promises that
a code point which has a meaning keeps its normalisation.)

Also: which documents a fast encoder may encode: those whose ids are proved to be the reference's.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from itertools import chain
from platform import machine
from typing import ClassVar
from unicodedata import unidata_version

import msgspec
import numpy as np

from olm_data.bounded_json import digest
from olm_data.counts import stretches
from olm_data.dataset.inputs import SpecialPolicy
from olm_data.decoding import decode_typed
from olm_data.tokenizer.definition import Form
from olm_data.tokenizer.tokenizer import TokenizerSpec
from olm_data.user_cache import read_private, write_private

Ranges = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
NEAR = (range(0xD800), range(0xE000, 0x40000), range(0xE0000, 0xF0000))
"""The planes in which characters are, or soon may be: 0 to 3 and 14."""
FAR = (range(0x40000, 0xE0000), range(0xF0000, LAST + 1))
"""The other planes: unassigned or for private use."""

SCAN_BYTES = 1 << 20


class CodePoints:
    """A set of code points that is looked for in buffers of UTF-8.

    Args:
        ranges: [first, last] of each stretch, ascending, none below U+0080.

    Raises:
        ValueError: they are none.
    """

    def __init__(self, ranges: Ranges) -> None:
        if any(not 0x80 <= first <= last <= LAST for first, last in ranges):
            raise ValueError(f"no ranges of code points above ASCII: {ranges[:3]}")
        self._first = np.array([first for first, _ in ranges], np.int64)
        self._last = np.array([last for _, last in ranges], np.int64)
        # Which first bytes, and first two, such a character has: UTF-8 sorts as code points do.
        self._lead = np.zeros(256, bool)
        self._pair = np.zeros(65536, bool)
        for stretch in ranges:
            low, high = (int.from_bytes(chr(point).encode()[:2], "big") for point in stretch)
            self._lead[low >> 8 : (high >> 8) + 1] = True
            self._pair[low : high + 1] = True
        self._least = int(self._lead.argmax())

    def places(self, data: np.ndarray) -> np.ndarray:
        """Return where in uint8[n], valid UTF-8, a code point of the set begins: int64[m]."""
        if not len(self._first):
            return np.empty(0, np.int64)
        found = [np.empty(0, np.int64)]
        for start in range(0, len(data), SCAN_BYTES):
            leads = np.flatnonzero(data[start : start + SCAN_BYTES] >= self._least) + start
            at = leads[self._lead[data[leads]]]
            at = at[self._pair[data[at].astype(np.uint16) << 8 | data[at + 1]]]
            if len(at):
                found.append(at[self._holds(_decoded(data, at))])
        return np.concatenate(found)

    def documents(self, data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return which documents hold a code point of the set: bool[d].

        Args:
            data: uint8[n], valid UTF-8 of the documents, concatenated.
            offsets: int64[d + 1], rising from 0 to n.
        """
        held = np.zeros(len(offsets) - 1, bool)
        held[np.searchsorted(offsets, self.places(data), side="right") - 1] = True
        return held

    def _holds(self, points: np.ndarray) -> np.ndarray:
        stretch = np.searchsorted(self._first, points, side="right") - 1
        return (stretch >= 0) & (points <= self._last[stretch])


def _decoded(data: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return the code points (int64) that begin at `at`; each has at least two bytes."""
    lead = data[at].astype(np.int64)
    size = 2 + (lead >= 0xE0) + (lead >= 0xF0)
    points: np.ndarray = lead & (0x7F >> size)
    for k in (1, 2, 3):
        more = size > k
        points[more] = points[more] << 6 | data[at[more] + k] & 0x3F
    return points


def points_of(ranges: Ranges) -> Iterator[int]:
    """Yield the code points of ranges."""
    return (point for first, last in ranges for point in range(first, last + 1))


@lru_cache(maxsize=4)
def unsettled(form: Form) -> Ranges:
    """Return the code points whose presence means that a text may change under `form`."""
    seconds = set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))  # of Hangul syllables
    for point in chain(*NEAR):
        parts = unicodedata.decomposition(chr(point)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            seconds.add(int(parts[1], 16))

    def settled(point: int) -> bool:
        character = chr(point)
        return (
            unicodedata.category(character) != "Cn"
            and not unicodedata.combining(character)
            and unicodedata.normalize(form, character) == character
            and point not in seconds
        )

    near = [point for point in chain(*NEAR) if point >= 0x80 and not settled(point)]
    far = ((0x40000, 0xDFFFF), (0xF0000, LAST))
    return tuple(sorted((*stretches(near), *far)))


LONGEST = 1 << 20
"""Bytes of a document that is normalised to see if it changes; takes 20 times that."""


class ReferenceRouter:
    """Finds the documents of a batch that are for the reference.

    Args:
        tokenizer: the tokenizer.
        routed: code points on which the fast encoder differs.
    """

    def __init__(self, tokenizer: TokenizerSpec, routed: Ranges) -> None:
        self._routed = CodePoints(routed)
        self._normalizer = None
        if tokenizer.form is not None:
            self._unsettled = CodePoints(unsettled(tokenizer.form))
            self._normalizer = tokenizer.reference.normalizer

    def documents(self, data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return which documents are for the reference: bool[d].

        Args:
            data: uint8[n], valid UTF-8 of the documents, concatenated.
            offsets: int64[d + 1], rising from 0 to n.
        """
        chosen = self._routed.documents(data, offsets)
        if self._normalizer is not None:
            doubtful = self._unsettled.documents(data, offsets) & ~chosen
            for k in np.flatnonzero(doubtful).tolist():
                chosen[k] = self._changes(data[offsets[k] : offsets[k + 1]])
        return chosen

    def _changes(self, document: np.ndarray) -> bool:
        if len(document) > LONGEST:
            return True
        text = document.tobytes().decode()
        assert self._normalizer is not None
        return bool(self._normalizer.normalize_str(text) != text)


GATE = 2
"""Of what is compared (`sweep`, `adversarial`, `routing`): a change makes old proofs void."""

MOST_BYTES = 1 << 18


class Proof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an encoder gives the reference's ids.

    Attributes:
        refused: "", or why the encoder is not used for this tokenizer.
        routed: code points whose documents are for the reference.
    """

    refused: str = ""
    routed: Ranges = ()


class ParityReport(msgspec.Struct, frozen=True, kw_only=True):
    """Which encoder a run uses, and what is proved of it.

    Attributes:
        encoder: the encoder to use.
        requested: what was asked for ("auto", "hf", "gigatoken").
        claim: what was proved, or why it needs no proof, as the summary says it.
        routed: code points whose documents are encoded by the reference.
        reasons: what sends a document to the reference, in words; "" where nothing does.
        note: one sentence for the user, or "": why a faster encoder is not used.
    """

    encoder: str
    requested: str
    claim: str = "the reference"
    routed: Ranges = ()
    reasons: str = ""
    note: str = ""

    COLUMNS: ClassVar = {"routed": None}


def recall(encoder: str, tokenizer: TokenizerSpec, special: SpecialPolicy) -> Proof | None:
    """Return the proof in the user's cache, or None."""
    data = read_private(_place(encoder, tokenizer, special), MOST_BYTES)
    try:
        stored = decode_typed(data or b"{}", _Stored)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return None
    proof = Proof(refused=stored.refused, routed=stored.routed)
    flat = [point for stretch in proof.routed for point in stretch]
    rising = flat == sorted(flat) and all(0x80 <= point <= LAST for point in flat)
    return proof if rising and stored.sha256 == _digest(proof) else None


def remember(proof: Proof, encoder: str, tokenizer: TokenizerSpec, special: SpecialPolicy) -> None:
    """Put a proof in the user's cache; a cache that cannot be written is none."""
    stored = _Stored(refused=proof.refused, routed=proof.routed, sha256=_digest(proof))
    write_private(_place(encoder, tokenizer, special), msgspec.json.encode(stored))


class _Stored(Proof, frozen=True, kw_only=True):
    sha256: str = ""


def _digest(proof: Proof) -> str:
    return digest({"refused": proof.refused, "routed": proof.routed})


def _place(encoder: str, tokenizer: TokenizerSpec, special: SpecialPolicy) -> str:
    case = tokenizer.sha256, sorted(tokenizer.special_tokens), special == "allow"
    parts = [GATE, encoder, version(encoder), version("tokenizers"), unidata_version, machine()]
    return f"encoders/{sha256(msgspec.json.encode([*parts, *case])).hexdigest()}"
