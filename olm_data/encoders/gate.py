"""The equality gate: what is proved of a fast encoder before it is used for a tokenizer.

    every code point in its contexts, mixtures of them (sweep)  -> equal, but for routed code points
    adversarial texts: long runs, special tokens, normalisation -> equal, as a run encodes them
    a sample of the input, where nothing was proved before      -> equal, as a run encodes it

`hf` itself is the measure and is never compared.

Also: the sweep of the equality gate: every code point in its contexts, then mixtures of them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from olm_data.config.import_path import is_import_path
from olm_data.counts import stretches
from olm_data.dataset.inputs import SpecialPolicy
from olm_data.encoders.base import (
    Encoder,
    TextEncoder,
    Texts,
    Unencodable,
    compare,
    concatenate,
    differences,
)
from olm_data.encoders.code_points import (
    FAR,
    NEAR,
    Proof,
    Ranges,
    ReferenceRouter,
    points_of,
    recall,
    remember,
    unsettled,
)
from olm_data.encoders.hf import HfEncoder
from olm_data.errors import ValidationError
from olm_data.threads import in_order
from olm_data.tokenizer.definition import Definition
from olm_data.tokenizer.tokenizer import PROBE_TEXTS, TokenizerSpec, spec_from_bytes

MIXED_CONTEXTS = ("a@a @.1@\n", "\u0301@\u0301A@@'@s\u4e2d@\t@\r\n")
"""`@` is the code point: in a word, beside space, sign, digit, mark, quote, tab, line end."""
BLOCK_CONTEXTS = ("a@ @.1@\n",)
FAR_CONTEXT = "a@."
"""`@` is a run of `RUN` neighbours."""

RUN, RUN_ALONE = 16, 4
LONG = 64  # a stretch of so many code points of one category is a long block
BLOCK_CATEGORIES = frozenset({"Lo", "Cn", "Co"})
EDGE, EVERY = 8, 251  # of a long block, the ends and every so many go into the nine contexts too

BLOCK = 64  # code points in one text
CHUNK = 256  # texts encoded at once
THREADS = 4
MOST_ROUTED = 1 << 14  # an encoder that differs on more code points is not used


class Sweep(NamedTuple):
    """Code points to compare, and how.

    Attributes:
        context: `@` is the code points.
        points: the code points, ascending.
        run: how many neighbours stand for one `@`.
    """

    context: str
    points: Sequence[int]
    run: int = 1


class Unproved(Exception):
    """The encoder is not used for this tokenizer; the text says where it differs."""


def contexts(letters: Collection[int] = ()) -> list[Sweep]:
    """Return the sweeps over every code point; `letters` go into all contexts.

    Args:
        letters: code points that the vocabulary knows one by one, where it is not one of bytes.
    """
    mixed, blocks = _parted()
    if letters:
        mixed = sorted({*mixed, *letters})
    return [
        *(Sweep(context, mixed) for context in MIXED_CONTEXTS),
        *(Sweep(context, blocks) for context in BLOCK_CONTEXTS),
        Sweep(FAR_CONTEXT, tuple(chain(*FAR)), RUN),
    ]


def alone() -> list[Sweep]:
    """Return the sweeps over the code points that are, or may become, characters, by themselves."""
    mixed, blocks = _parted()
    return [Sweep("@\n", mixed), Sweep("@\n", blocks, RUN_ALONE)]


def _parted() -> tuple[list[int], list[int]]:
    """Return the near code points of mixed kinds, and those of long blocks of one kind."""
    points, categories = _categories()
    ends = (np.diff(points) != 1) | (categories[1:] != categories[:-1])
    block = np.zeros(len(points), bool)
    sampled = np.zeros(len(points), bool)
    for first, last in pairwise([0, *(np.flatnonzero(ends) + 1).tolist(), len(points)]):
        if last - first >= LONG and categories[first] in BLOCK_CATEGORIES:
            block[first:last] = True
            sampled[first:last:EVERY] = True
            sampled[first : first + EDGE] = sampled[last - EDGE : last] = True
    return points[~block | sampled].tolist(), points[block].tolist()


def _categories() -> tuple[np.ndarray, np.ndarray]:
    """Return the near code points (int64, ascending) and their general categories (U2)."""
    points = [*chain(*NEAR)]
    return np.array(points), np.array([*map(unicodedata.category, map(chr, points))])


def differing(reference: Encoder, encoder: Encoder, sweeps: Sequence[Sweep]) -> Ranges:
    """Return the code points on which an encoder gives other ids than the reference.

    Raises:
        Unproved: they are too many, or one is ASCII.
    """
    found: set[int] = set()
    for sweep in sweeps:
        points = sweep.points
        blocks = [points[k : k + BLOCK] for k in range(0, len(points), BLOCK)]
        suspects = _that_differ(sweep, blocks, reference, encoder)
        if len(suspects) * BLOCK > 4 * MOST_ROUTED:
            share = f"{len(suspects) / len(blocks):.0%}"
            raise Unproved(f"it differs on {share} of the texts compared")
        found |= _narrowed(sweep, suspects, reference, encoder)
        if found and (min(found) < 0x80 or len(found) > MOST_ROUTED):
            raise Unproved(f"it differs on {named(sorted(found))}")
    return stretches(sorted(found))


def named(points: Sequence[int]) -> str:
    """Return `471 code points (U+1ACF, U+20C1, ...)`."""
    shown = ", ".join(f"U+{point:04X}" for point in points[:3])
    more = ", ..." if len(points) > 3 else ""
    return f"{len(points):,} code point{'s' * (len(points) != 1)} ({shown}{more})"


def mixtures(routed: Ranges) -> list[bytes]:
    """Return seeded texts of code points that are not routed, those that interact often."""
    generator = np.random.Generator(np.random.PCG64(20260101))
    left_out = set(points_of(routed))
    pools = [np.array([p for p in pool if p not in left_out]) for pool in _pools()]
    made = []
    for _ in range(120):
        weights = generator.dirichlet(np.full(len(pools), 0.3))  # a text has a few kinds, not all
        kinds = generator.choice(len(pools), size=200, p=weights)
        within = generator.random(len(kinds))
        points = [int(pools[k][int(u * len(pools[k]))]) for k, u in zip(kinds, within, strict=True)]
        made.append("".join(map(chr, points)).encode())
    return made


def _pools() -> list[list[int]]:
    """Code points by how they behave: pools of ASCII kinds, spaces, and by category."""
    points, categories = _categories()
    common = ((points >= 0x80) & (points < 0x3400)) | ((points >= 0xA000) & (points < 0xAC00))
    common |= (points >= 0xF900) & (points < 0x20000)
    points, categories = points[common], categories[common]
    return [
        [*range(0x61, 0x7B)],
        [*range(0x41, 0x5B)],
        [*range(0x30, 0x3A)],
        [0x20, 0x20, 0x20, 0x0A, 0x0D, 0x09, 0xA0, 0x3000, 0x2028, 0x85, 0x0B],
        [*b"'stmdlvreLVRESTMD"],
        [*b"!\"#$%&()*+,-./:;<=>?@[\\]^_`{|}~'"],
        [*range(0x300, 0x370), *range(0x1AB0, 0x1AD0), *range(0x20D0, 0x20F1), 0x61, 0x65],
        [*range(0x1100, 0x1200), *range(0xAC00, 0xAC40)],
        [0x200D, 0xFE0F, 0x1F3FB, 0x1F3FF, 0x1F468, 0x1F469, 0x2764, *range(0x1F1E6, 0x1F200)],
        [*range(0x4E00, 0x4E80), *range(0x3040, 0x3100), 0x3002, 0xFF0C],
        [*range(0x900, 0x980)],
        [*range(0x600, 0x700)],
        [*range(0xAC00, 0xD7A4, 7), *range(0x3400, 0x9FFF, 97), *range(0x20000, 0x3FFFF, 997)],
        *(points[categories == category].tolist() for category in np.unique(categories)),
    ]


def _texts(sweep: Sweep, blocks: Sequence[Sequence[int]]) -> Iterator[bytes]:
    context, _, run = sweep
    for block in blocks:
        text = "".join(map(chr, block))
        runs = [text[k : k + run] for k in range(0, len(text), run)]
        yield "".join([context.replace("@", characters) for characters in runs]).encode()


def _that_differ(
    sweep: Sweep, blocks: Sequence[Sequence[int]], reference: Encoder, encoder: Encoder
) -> list[Sequence[int]]:
    chunks = [blocks[start : start + CHUNK] for start in range(0, len(blocks), CHUNK)]
    buffers = [concatenate(_texts(sweep, chunk)) for chunk in chunks]
    found = []
    # the reference takes nearly all of the time
    references = in_order(lambda texts: reference.encode(*texts), buffers, THREADS)
    for chunk, texts, wanted in zip(chunks, buffers, references, strict=True):
        found += [chunk[k] for k in differences(wanted, encoder.encode(*texts))]
    return found


def _narrowed(
    sweep: Sweep, blocks: list[Sequence[int]], reference: Encoder, encoder: Encoder
) -> set[int]:
    """Return the code points that make the blocks differ; all of a block that only does whole."""
    found: set[int] = set()
    while blocks:
        found |= {block[0] for block in blocks if len(block) == 1}
        parents = [block for block in blocks if len(block) > 1]
        halves = [half for b in parents for half in (b[: len(b) // 2], b[len(b) // 2 :])]
        blocks = _that_differ(sweep, halves, reference, encoder)
        differ = {point for block in blocks for point in block}
        found |= {p for parent in parents if not differ.intersection(parent) for p in parent}
    return found


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
        router = ReferenceRouter(tokenizer, routed)
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
    return stretches(sorted({*points_of(cuts), *points_of(found)}))


def _cuts(make: Callable[[TokenizerSpec], Encoder], name: str, probe: bytes) -> Ranges:
    """Return the code points at which the encoder cuts otherwise; the same for all tokenizers with
    one rule of cutting, so it is kept apart from them."""
    own = is_import_path(name)  # it may be other code tomorrow: nothing of it is kept
    shown = spec_from_bytes(probe, name="probe", eos="none")
    proof = None if own else recall(name, shown, "plain")
    if proof is None:
        try:
            proof = Proof(routed=differing(HfEncoder(shown, "plain"), make(shown), contexts()))
        except Unproved as error:
            proof = Proof(refused=str(error))
        if not own:
            remember(proof, name, shown, "plain")
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
    texts += ["\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f3fd"]
    texts += ["\U0001f600" * 99]
    texts += ["I'm we'LL it's CAN'T don\u2019t 'tis ''s 'S", "HTTPServer camelCase snake_case"]
    texts += ["<|", "|>", "<|endoftext", "endoftext|>", "<||>", "[", "<s", "</"]
    texts += ["\u2581a\u2581\u2581b", "\u00ff\u00fe\u0080", "\u00c3\u00a9"]
    texts += ["\U0010ffff\ufdd0\ue000", "\u2028x\u2029y\x85z\x0bw"]
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
