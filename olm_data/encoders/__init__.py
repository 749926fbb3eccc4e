"""Encoders: plug-ins that turn text into token ids, and the gate that proves them equal.

    choose_encoder("auto", tokenizer, "plain", data, offsets) -> ParityReport     once, before a run
    make_encoder(report.encoder, tokenizer, "plain") -> TextEncoder               in each process

Neither library is imported before an encoder is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import numpy as np

from olm_data.encoders.base import Encoded, Encoder, SpecialPolicy
from olm_data.encoders.gigatoken import GigatokenEncoder, UnsupportedTokenizer
from olm_data.encoders.hf import HfEncoder
from olm_data.encoders.parity import ParityReport, adversarial, compare, concatenate, sample_of
from olm_data.encoders.text import TextEncoder
from olm_data.errors import UsageError, ValidationError, suggest
from olm_data.tokenizer import TokenizerSpec

__all__ = [
    "ENCODERS",
    "Encoded",
    "Encoder",
    "ParityReport",
    "SpecialPolicy",
    "TextEncoder",
    "choose_encoder",
    "likely_encoder",
    "make_encoder",
]

ENCODERS: dict[str, Callable[[TokenizerSpec, SpecialPolicy], Encoder]] = {
    "hf": HfEncoder,
    "gigatoken": GigatokenEncoder,
}  # reference first, then by speed


def make_encoder(name: str, tokenizer: TokenizerSpec, special: SpecialPolicy) -> TextEncoder:
    """Make the encoder `name` for this process; all but the reference are audited against it.

    Raises:
        UsageError: no such encoder, or its library is not installed or cannot load the tokenizer.
    """
    reference = None if name == "hf" else partial(HfEncoder, tokenizer, special)
    return TextEncoder(_plug_in(name, tokenizer, special), tokenizer, special, reference)


def likely_encoder(requested: str) -> str:
    """Return the encoder that `choose_encoder` will most likely choose, without loading it."""
    if requested != "auto":
        return requested
    return "hf" if find_spec("gigatoken") is None else "gigatoken"


def choose_encoder(
    requested: str,
    tokenizer: TokenizerSpec,
    special: SpecialPolicy,
    data: np.ndarray,
    offsets: np.ndarray,
) -> ParityReport:
    """Decide which encoder a run uses, and prove that it gives the reference's ids.

    Args:
        requested: "auto" (the fastest installed one that passes), "hf" or "gigatoken".
        data, offsets: the first documents of the input; about 256 KiB of them are compared.

    Raises:
        UsageError: the encoder asked for does not exist, is not installed or cannot load the
            tokenizer.
        ValidationError: the encoder asked for gives other ids than the reference.
    """
    if requested == "hf":
        return ParityReport(encoder="hf", requested=requested)
    name = "gigatoken" if requested == "auto" else requested
    if requested == "auto" and find_spec("gigatoken") is None:
        note = "gigatoken is not installed; pip install 'olm[fast]' makes this many times faster"
        return ParityReport(encoder="hf", requested=requested, note=note)
    try:
        encoder = _plug_in(name, tokenizer, special)
    except UnsupportedTokenizer as error:
        if requested != "auto":
            raise
        return ParityReport(encoder="hf", requested=requested, note=f"{error.what}: using hf")
    reference = HfEncoder(tokenizer, special)
    documents = tokens = 0
    for sample in (concatenate(adversarial(tokenizer)), sample_of(data, offsets)):
        count, difference = compare(reference, encoder, *sample)
        documents += len(sample[1]) - 1
        tokens += count
        if difference:
            if requested != "auto":
                raise ValidationError(
                    f"the encoder {name} gives other ids than the reference",
                    where=f"--encoder {name}, tokenizer {tokenizer.name}",
                    why=difference,
                    fix="--encoder hf",
                )
            note = (
                f"{name} failed the parity gate ({difference}): using hf, which is slower but right"
            )
            return ParityReport(
                encoder="hf", requested=requested, documents=documents, tokens=tokens, note=note
            )
    return ParityReport(encoder=name, requested=requested, documents=documents, tokens=tokens)


def _plug_in(name: str, tokenizer: TokenizerSpec, special: SpecialPolicy) -> Encoder:
    if name not in ENCODERS:
        raise UsageError(
            f"there is no encoder {name!r}",
            where=f"--encoder {name}",
            fix=suggest(name, ["auto", *ENCODERS]),
        )
    return ENCODERS[name](tokenizer, special)
