"""The equality gate: what is proved of a fast encoder before it is used for a tokenizer.

    every code point in its contexts, mixtures of them (sweep)  -> equal, but for routed code points
    adversarial texts: long runs, special tokens, normalisation -> equal, as a run encodes them
    a sample of the input, where nothing was proved before      -> equal, as a run encodes it

`hf` itself is the measure and is never compared.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from olm_data.config.import_path import is_import_path
from olm_data.dataset.choices import SpecialPolicy
from olm_data.encoders.base import Encoder, Texts, Unencodable, concatenate
from olm_data.encoders.code_points import NEAR, Ranges, points_of, ranges_of, unsettled
from olm_data.encoders.gate_texts import adversarial, sample_of
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
from olm_data.tokenizer.tokenizer import TokenizerSpec, spec_from_bytes


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
