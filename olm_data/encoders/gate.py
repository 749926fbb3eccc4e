"""The equality gate: what is proved of a fast encoder before it is used for a tokenizer.

    every code point in its contexts, mixtures of them (sweep)  -> equal, but for routed code points
    adversarial texts: long runs, special tokens, normalisation -> equal, as a run encodes them
    a sample of the input, where nothing was proved before      -> equal, as a run encodes it

`hf` itself is the measure and is never compared.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise

import numpy as np

from olm_data.config.import_path import is_import_path
from olm_data.dataset.choices import SpecialPolicy
from olm_data.encoders.base import Encoder, Texts, Unencodable, concatenate
from olm_data.encoders.code_points import NEAR, Ranges, points_of, ranges_of, unsettled
from olm_data.encoders.hf import HfEncoder
from olm_data.encoders.parity import compare
from olm_data.encoders.proof import Proof, recall_cuts, remember_cuts
from olm_data.encoders.routing import Router
from olm_data.encoders.sweep import (
    BLOCK_CONTEXTS,
    MIXED_CONTEXTS,
    RUN,
    Unproved,
    alone,
    contexts,
    differing,
    mixtures,
    named,
)
from olm_data.encoders.text import TextEncoder
from olm_data.errors import ValidationError
from olm_data.tokenizer.definition import Definition
from olm_data.tokenizer.tokenizer import PROBE_TEXTS, TokenizerSpec, spec_from_bytes


def prove(
    make: Callable[[TokenizerSpec], Encoder],
    tokenizer: TokenizerSpec,
    special: SpecialPolicy,
    sample: Texts,
) -> Proof:
    """Compare an encoder with the reference over Unicode; takes seconds.

    Args:
        make: makes the encoder of a tokenizer, for this policy.
        sample: documents of the input; some of them are compared too.

    Raises:
        UnsupportedTokenizer: it cannot be made.
    """
    encoder = make(tokenizer)
    try:
        _refuse_unprovable(tokenizer)
        bare = HfEncoder(tokenizer, special, normalize=tokenizer.form is None)
        routed = _routed(make, encoder, bare, tokenizer)
        texts = concatenate(mixtures(routed))
        _refuse(compare(bare.encode(*texts), encoder.encode(*texts)), "mixtures of code points")
        reference = HfEncoder(tokenizer, special)
        router = Router(tokenizer, routed)
        run = TextEncoder(encoder, tokenizer, special, lambda: reference, router)
        for name, texts in (
            ("adversarial texts", concatenate(adversarial(tokenizer))),
            ("the input", sample_of(*sample)),
        ):
            made = run.encode(*texts)
            _refuse(compare(reference.encode(*texts), (made.ids, made.offsets)), name)
    except Unproved as error:
        return Proof(refused=str(error))
    except Unencodable as error:
        return Proof(refused=f"the reference cannot encode the texts of the gate ({error})")
    except ValidationError as error:
        return Proof(refused=f"it differs on texts of the gate: {error.why}")
    return Proof(routed=routed)


def _routed(
    make: Callable[[TokenizerSpec], Encoder],
    encoder: Encoder,
    bare: Encoder,
    tokenizer: TokenizerSpec,
) -> Ranges:
    """Return the code points on which the encoder differs: in cuts between words, and by itself."""
    definition = Definition(tokenizer.json_bytes, tokenizer.name)
    probe = definition.boundary_probe()
    if probe is None:
        return differing(bare, encoder, contexts(definition.letters))
    cuts = _cuts(make, encoder.name, probe)
    found = differing(bare, encoder, alone())
    return ranges_of(sorted({*points_of(cuts), *points_of(found)}))


def _cuts(make: Callable[[TokenizerSpec], Encoder], name: str, probe: bytes) -> Ranges:
    """Return the code points at which the encoder cuts otherwise; the same for all tokenizers with
    one rule of cutting, so it is kept apart from them."""
    own = is_import_path(name)  # it may be other code tomorrow: nothing of it is kept
    proof = None if own else recall_cuts(name, probe)
    if proof is None:
        shown = spec_from_bytes(probe, name="probe", eos="none")
        try:
            proof = Proof(routed=differing(HfEncoder(shown, "plain"), make(shown), contexts()))
        except Unproved as error:
            proof = Proof(refused=str(error))
        if not own:
            remember_cuts(proof, name, probe)
    if proof.refused:
        raise Unproved(proof.refused)
    return proof.routed


def claim() -> str:
    """Return what is proved of an encoder that is used, in a few words."""
    mixed, blocks = (sum(c.count("@") for c in s) for s in (MIXED_CONTEXTS, BLOCK_CONTEXTS))
    return (
        f"the ids of hf, proved on every code point (in {mixed} contexts; {blocks} in long blocks "
        f"of one kind; runs of {RUN} in empty planes)"
    )


def reasons(proof: Proof, tokenizer: TokenizerSpec) -> str:
    """Return what sends a document to the reference, in words; "" where nothing does."""
    found = []
    if proof.routed:
        found.append(f"hold one of {named([*points_of(proof.routed)])}")
    if tokenizer.form is not None:
        found.append(f"change under {tokenizer.form}")
    return " or ".join(found)


def _refuse(difference: str, where: str) -> None:
    if difference:
        raise Unproved(f"it differs on {where}: {difference}")


def _refuse_unprovable(tokenizer: TokenizerSpec) -> None:
    """Refuse a tokenizer with a normaliser that the routing cannot decide about."""
    if tokenizer.form is None and tokenizer.rewrites:
        raise Unproved(f"nothing is proved with the normaliser {tokenizer.rewrites}")
    if tokenizer.form is not None:
        normalize = tokenizer.reference.normalizer.normalize_str
        kept = _settled(tokenizer)
        names = [*tokenizer.added_tokens, kept, kept[::-1]]
        if any(normalize(name) != name for name in names):
            raise Unproved(f"its tables for {tokenizer.form} are not those of this Python")


def _settled(tokenizer: TokenizerSpec) -> str:
    assert tokenizer.form is not None
    changing = set(points_of(unsettled(tokenizer.form)))
    return "".join(chr(point) for point in chain(*NEAR) if point not in changing)


SAMPLE_BYTES = 1 << 18  # the reference takes half a second a megabyte; the audit does the rest


def sample_of(data: np.ndarray, offsets: np.ndarray) -> Texts:
    """Return documents from the start, `SAMPLE_BYTES` of text at most; longer ones are left out."""
    rows: list[bytes] = []
    room = SAMPLE_BYTES
    for start, stop in pairwise(offsets.tolist()):
        if stop - start <= room:
            rows.append(data[start:stop].tobytes())
            room -= stop - start
        if room == 0:
            break
    return concatenate(rows)


def adversarial(tokenizer: TokenizerSpec) -> list[bytes]:
    """Return short documents on which tokenizers have been seen to differ."""
    texts = list(PROBE_TEXTS)
    texts += ["", " ", "\n", "\r\n\r\n \r\n", "\t \t", "a", "\x00", "\ufeff", "\ufffd"]
    texts += [space * n for space in (" ", "\n", "\t", "\u00a0", "\u3000") for n in (2, 7, 100)]
    texts += [f"x{' ' * n}y{chr(10) * n}z" for n in range(1, 30)]
    texts += ["a" * 10_000, "ab" * 5_000, " a" * 3_000, "1" * 1_000, "!?" * 500, "\u0301" * 300]
    texts += [str(n) for n in (0, 7, 10, 999, 1000, 123456789, 3.14159, -1e300)]
    texts += ["1,234,567.89", "\u0661\u0662\u0663", "x\u00b2 \u00bd \u2167 \u2460"]
    # Combining marks, composed and decomposed; conjoining Hangul; marks in the wrong order.
    texts += ["\u00e9", "e\u0301", "e\u0301\u0323", "e\u0323\u0301", "\u1112\u1161\u11ab", "\ud55c"]
    texts += [
        "n\u0303o \u0915\u094d\u0937\u093f \u0e01\u0e33 \u0627\u064b\u0651 \u05d0\u05b8\u05d1"
    ]
    texts += ["\u202eabc\u202c \u0627\u0644\u0639\u0631\u0628\u064a\u0629 abc \u05e2\u05d1\u05e8"]
    texts += [
        "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f3fd",
        "\U0001f600" * 99,
    ]
    texts += ["I'm we'LL it's CAN'T don\u2019t 'tis ''s 'S", "HTTPServer camelCase snake_case"]
    texts += [
        "<|",
        "|>",
        "<|endoftext",
        "endoftext|>",
        "<||>",
        "[",
        "<s",
        "</",
        "\u2581a\u2581\u2581b",
    ]
    texts += [
        "\u00ff\u00fe\u0080",
        "\u00c3\u00a9",
        "\U0010ffff\ufdd0\ue000",
        "\u2028x\u2029y\x85z\x0bw",
    ]
    for token in tokenizer.special_tokens:
        texts += [token, f"a{token}b", f" {token} {token}", token[:-1], token + token[1:]]
    return [text.encode() for text in texts] + _random_texts()


def _random_texts() -> list[bytes]:
    """Return seeded random strings over the whole of Unicode and over what is common in text."""
    generator = np.random.Generator(np.random.PCG64(20260101))
    texts = []
    for top in (0x7F, 0xFF, 0x24F, 0x6FF, 0x2FFF, 0xFFFF, 0x10FFFF):
        for length in (3, 50, 400):
            points = generator.integers(0, top + 1, size=length)
            points[(points >= 0xD800) & (points <= 0xDFFF)] = 0x20
            points[generator.random(length) < 0.15] = 0x20
            texts.append("".join(map(chr, points)).encode())
    return texts
