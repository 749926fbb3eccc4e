"""The sweep of the equality gate: every code point in its contexts, then mixtures of them.

    code points of mixed kinds, 64 to a text, in nine contexts  -> ids of the reference == ids of
    long blocks of one kind (ideographs, unassigned), in three  ->             the encoder?
    empty and private planes, runs of 16 in one                 ->
        a text that differs -> halved until single code points are left -> they are routed
    seeded mixtures of what is left (marks, jamo, emoji, scripts, spaces, digits) -> no difference

Both get the tokenizer without its normaliser (see `routing`), and at first with a vocabulary that
shows every cut between words (`boundary_probe`): where an encoder cuts depends on the class that
its Unicode tables give a code point, which the contexts bring out; three are enough to tell nearly
all classes apart. Then come each code point and the mixtures with the real vocabulary.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from olm_data.encoders.base import Encoder, concatenate
from olm_data.encoders.code_points import FAR, NEAR, Ranges, points_of, ranges_of
from olm_data.encoders.parity import differences
from olm_data.threads import in_order

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
    mixed, blocks = _parted(_near())
    if letters:
        mixed = sorted({*mixed, *letters})
    return [
        *(Sweep(context, mixed) for context in MIXED_CONTEXTS),
        *(Sweep(context, blocks) for context in BLOCK_CONTEXTS),
        Sweep(FAR_CONTEXT, tuple(chain(*FAR)), RUN),
    ]


def alone() -> list[Sweep]:
    """Return the sweeps over the code points that are, or may become, characters, by themselves."""
    mixed, blocks = _parted(_near())
    return [Sweep("@\n", mixed), Sweep("@\n", blocks, RUN_ALONE)]


def _near() -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, NEAR))


@lru_cache(maxsize=1)
def _parted(near: tuple[tuple[int, ...], ...]) -> tuple[list[int], list[int]]:
    """Return the near code points of mixed kinds, and those of long blocks of one kind."""
    points, categories = _categories(near)
    ends = (np.diff(points) != 1) | (categories[1:] != categories[:-1])
    block = np.zeros(len(points), bool)
    sampled = np.zeros(len(points), bool)
    for first, last in pairwise([0, *(np.flatnonzero(ends) + 1).tolist(), len(points)]):
        if last - first >= LONG and categories[first] in BLOCK_CATEGORIES:
            block[first:last] = True
            sampled[first:last:EVERY] = True
            sampled[first : first + EDGE] = sampled[last - EDGE : last] = True
    return points[~block | sampled].tolist(), points[block].tolist()


@lru_cache(maxsize=1)
def _categories(near: tuple[tuple[int, ...], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the near code points (int64, ascending) and their general categories (U2)."""
    points = [*chain(*near)]
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
    return ranges_of(sorted(found))


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
    points, categories = _categories(_near())
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
