"""Encoders: plug-ins that turn text into token ids, and the gate that proves them equal.

    find_encoder("auto", tokenizer, "plain", text_bytes, texts) -> ParityReport
        known_encoder: what needs no comparison, or none any more
        choose_encoder: by the gate, in seconds
    make_encoder(report.encoder, tokenizer, "plain", report.routed)  -> TextEncoder  in each process

Neither library is imported before an encoder is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec

from olm_data.config.import_path import is_import_path
from olm_data.dataset.inputs import SpecialPolicy
from olm_data.encoders.base import Encoded, Encoder, TextEncoder, Texts, concatenate
from olm_data.encoders.code_points import (
    ParityReport,
    Proof,
    Ranges,
    ReferenceRouter,
    recall,
    remember,
)
from olm_data.encoders.gigatoken import GigatokenEncoder, UnsupportedTokenizer
from olm_data.encoders.hf import HfEncoder
from olm_data.encoders.own import own_encoder, own_path
from olm_data.errors import UsageError, ValidationError, suggest
from olm_data.extras import install
from olm_data.tokenizer.tokenizer import TokenizerSpec

__all__ = ["Encoded", "ParityReport", "TextEncoder"]  # said to others, too

ENCODERS: dict[str, Callable[[TokenizerSpec, SpecialPolicy], Encoder]] = {
    "hf": HfEncoder,
    "gigatoken": GigatokenEncoder,
}  # reference first, then by speed

SMALL_TEXT = 2_000_000
"""Bytes of text that the reference encodes before another encoder is proved: about a second."""


def make_encoder(
    name: str, tokenizer: TokenizerSpec, special: SpecialPolicy, routed: Ranges = ()
) -> TextEncoder:
    """Make the encoder `name` for this process; all but the reference are audited against it.

    Args:
        routed: code points whose documents are for the reference (`ParityReport.routed`).

    Raises:
        UsageError: no such encoder, or its library is not installed or cannot load the tokenizer.
    """
    encoder = _plug_in(name, tokenizer, special)
    if name == "hf":
        return TextEncoder(encoder, tokenizer, special)
    reference, router = partial(HfEncoder, tokenizer, special), ReferenceRouter(tokenizer, routed)
    return TextEncoder(encoder, tokenizer, special, reference, router)


def likely_encoder(requested: str) -> str:
    """Return the encoder that `choose_encoder` will most likely choose, without loading it."""
    if requested != "auto":
        return requested if requested in ENCODERS else own_path(requested) or requested
    return "hf" if find_spec("gigatoken") is None else "gigatoken"


def find_encoder(
    requested: str,
    tokenizer: TokenizerSpec,
    special: SpecialPolicy,
    text_bytes: int,
    batches: Iterable[Texts],
) -> ParityReport:
    """Return the choice that is known, or made by the gate: that takes seconds, once for all.

    Args:
        requested: as in `choose_encoder`, which raises what this does.
        text_bytes: how much text there is to encode, about.
        batches: the documents of the input; the first batch is the sample, where one is needed.
    """
    known = known_encoder(requested, tokenizer, special, text_bytes)
    if known is not None:
        return known
    return choose_encoder(requested, tokenizer, special, next(iter(batches), concatenate([])))


def known_encoder(
    requested: str, tokenizer: TokenizerSpec, special: SpecialPolicy, text_bytes: int
) -> ParityReport | None:
    """Return the choice that needs no comparison, or none any more; None where one has to be made.

    Args:
        requested: as in `choose_encoder`.
        text_bytes: how much text there is to encode, about.

    Raises:
        ValidationError: as `choose_encoder`.
    """
    if requested == "hf":
        return ParityReport(encoder="hf", requested=requested)
    if requested == "auto":
        if text_bytes < SMALL_TEXT:
            claim = "the reference, as there is little text"
            return ParityReport(encoder="hf", requested=requested, claim=claim)
        if find_spec("gigatoken") is None:
            note = f"gigatoken is not installed; {install('fast')} makes this many times faster"
            return ParityReport(encoder="hf", requested=requested, note=note)
    name = likely_encoder(requested)
    if name not in ENCODERS or find_spec(name) is None:
        return None  # `choose_encoder` says what is wrong
    proof = recall(name, tokenizer, special)
    return None if proof is None else _report(proof, name, requested, tokenizer)


def choose_encoder(
    requested: str, tokenizer: TokenizerSpec, special: SpecialPolicy, sample: Texts
) -> ParityReport:
    """Decide which encoder a run uses, by the gate; where it is the reference, that is known.

    Args:
        requested: "auto" (the fastest installed one that passes), "hf", "gigatoken", or a class of
            one's own, by its import path or the entry point of a package: it is imported.
        sample: the first documents of the input; about 256 KiB of them are compared.

    Raises:
        UsageError: the encoder asked for does not exist, is not installed or cannot load the
            tokenizer.
        ValidationError: the encoder asked for gives other ids than the reference.
    """
    name = likely_encoder(requested)
    from olm_data.encoders.gate import prove

    try:
        proof = prove(lambda spec: _plug_in(name, spec, special), tokenizer, special, sample)
    except UnsupportedTokenizer as error:
        if requested != "auto":
            raise
        return ParityReport(encoder="hf", requested=requested, note=f"{error.what}: using hf")
    if name in ENCODERS:  # of one's own nothing tells whether it is the code that was proved
        remember(proof, name, tokenizer, special)
    return _report(proof, name, requested, tokenizer)


def _report(proof: Proof, name: str, requested: str, tokenizer: TokenizerSpec) -> ParityReport:
    from olm_data.encoders.gate import claim, reasons

    if not proof.refused:
        return ParityReport(
            encoder=name,
            requested=requested,
            claim=claim(),
            routed=proof.routed,
            reasons=reasons(proof, tokenizer),
        )
    if requested != "auto":
        raise ValidationError(
            f"the encoder {name} gives other ids than the reference",
            where=f"--encoder {name}, tokenizer {tokenizer.name}",
            why=proof.refused,
            fix="--encoder hf",
        )
    return ParityReport(
        encoder="hf",
        requested=requested,
        claim=f"the reference: {name} failed the gate",
        note=f"{name} is not used with this tokenizer, as {proof.refused}: "
        "using hf, which is slower but right",
    )


def _plug_in(name: str, tokenizer: TokenizerSpec, special: SpecialPolicy) -> Encoder:
    if is_import_path(name):
        return own_encoder(name, tokenizer, special)
    if name not in ENCODERS:
        raise UsageError(
            f"there is no encoder {name!r}",
            where=f"--encoder {name}",
            fix=f"{suggest(name, ['auto', *ENCODERS])}; one of your own: module:Class",
        )
    return ENCODERS[name](tokenizer, special)
