"""What is proved of an encoder for a tokenizer, the cache of it, and the choice it leads to.

    prove(tokenizer, special, "gigatoken") -> Proof          seconds, once for a tokenizer
    recall(...) -> Proof | None                              milliseconds, from the user's cache
    recall_cuts("gigatoken", probe) -> Proof | None          of all tokenizers that cut alike

A proof depends on the tokenizer's bytes, on the versions of both libraries and of Unicode here, and
on the gate itself; all of it is in the name of its file. A file that is damaged is as good as none.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from platform import machine
from unicodedata import unidata_version

import msgspec

from olm_data.bounded_json import digest
from olm_data.dataset.inputs import SpecialPolicy
from olm_data.decoding import decode_typed
from olm_data.encoders.code_points import LAST, Ranges
from olm_data.tokenizer.tokenizer import TokenizerSpec
from olm_data.user_cache import read_private, write_private

GATE = 2
"""Of what is compared (`sweep`, `adversarial`, `routing`): a change makes old proofs void."""

MOST_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Where an encoder gives the reference's ids.

    Attributes:
        refused: "", or why the encoder is not used for this tokenizer.
        routed: code points whose documents are for the reference.
    """

    refused: str = ""
    routed: Ranges = ()


@dataclass(frozen=True, kw_only=True)
class ParityReport:
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


def recall(encoder: str, tokenizer: TokenizerSpec, special: SpecialPolicy) -> Proof | None:
    """Return the proof in the user's cache, or None."""
    return _recall(_place(encoder, *_case(tokenizer, special)))


def remember(proof: Proof, encoder: str, tokenizer: TokenizerSpec, special: SpecialPolicy) -> None:
    """Put a proof in the user's cache; a cache that cannot be written is none."""
    _remember(proof, _place(encoder, *_case(tokenizer, special)))


def recall_cuts(encoder: str, probe: bytes) -> Proof | None:
    """Return what is proved of where an encoder cuts, from the cache; `probe` shows the rule."""
    return _recall(_place(encoder, sha256(probe).hexdigest()))


def remember_cuts(proof: Proof, encoder: str, probe: bytes) -> None:
    """Put what is proved of where an encoder cuts in the user's cache."""
    _remember(proof, _place(encoder, sha256(probe).hexdigest()))


def _recall(place: str) -> Proof | None:
    data = read_private(place, MOST_BYTES)
    try:
        return None if data is None else _decoded(data)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return None


def _remember(proof: Proof, place: str) -> None:
    content: dict[str, object] = asdict(proof)
    write_private(place, msgspec.json.encode(content | {"sha256": digest(content)}))


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    refused: str
    routed: list[tuple[int, int]]
    sha256: str


def _decoded(data: bytes) -> Proof | None:
    stored = decode_typed(data, _Stored)
    proof = Proof(refused=stored.refused, routed=tuple(stored.routed))
    flat = [point for stretch in proof.routed for point in stretch]
    rising = flat == sorted(flat) and all(0x80 <= point <= LAST for point in flat)
    return proof if rising and stored.sha256 == digest(asdict(proof)) else None


def _case(tokenizer: TokenizerSpec, special: SpecialPolicy) -> tuple[object, ...]:
    return tokenizer.sha256, sorted(tokenizer.special_tokens), special == "allow"


def _place(encoder: str, *case: object) -> str:
    parts = [GATE, encoder, version(encoder), version("tokenizers"), unidata_version, machine()]
    return f"encoders/{sha256(msgspec.json.encode([*parts, *case])).hexdigest()}"
