"""The draw and the set of ids as values: documented functions, exact, independent."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizing import hashes_of

from olm_data.dataset.account import pack, unpack
from olm_data.select.selection import IdSet, document_digests, drawn, sample_key


def test_the_draw_is_the_documented_function() -> None:
    def mix64(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    hashes = np.array([0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF], np.uint64)
    for seed, key in ((0, KEYS[0]), (1, KEYS[1]), (-7, KEYS[2])):
        assert int(sample_key(seed)) == key
        for share in (Fraction(1, 100), Fraction(1, 2), Fraction(99, 100)):
            expected = [mix64(int(h) ^ key) < int(share * 2**64) for h in hashes]
            assert drawn(hashes, share, seed).tolist() == expected
    assert [mix64(int(h) ^ KEYS[0]) for h in hashes] == DRAWS


KEYS = [0x5A26BDCC8480753A, 0x7631E12BEAE44327, 0xDEA1FEEA3179A91E]
DRAWS = [
    0xE174E59D740E02B,
    0xF208658FF4B78DEB,
    0xF00FFA70A44BB33A,
    0xB936DB3B579F996C,
    0xBE3D93746FA19FBB,
]


def test_draws_of_other_seeds_and_the_holdout_are_independent() -> None:
    hashes = hashes_of([f"document {n}" for n in range(20_000)])
    a, b = drawn(hashes, Fraction(1, 10), 0), drawn(hashes, Fraction(1, 10), 1)
    held = hashes < np.uint64(2**64 // 10)
    for one in (a, b, held):
        assert abs(one.mean() - 0.1) < 0.01
    for one, other in ((a, b), (a, held), (b, held)):
        assert abs((one & other).mean() - 0.01) < 0.004


def test_a_smaller_sample_is_part_of_a_larger_one() -> None:
    hashes = hashes_of([f"document {n}" for n in range(3000)])
    small, large = drawn(hashes, Fraction(1, 20), 3), drawn(hashes, Fraction(1, 5), 3)
    assert small.any()
    assert not (small & ~large).any()


@given(st.sets(st.text(max_size=4)), st.lists(st.none() | st.text(max_size=4)))
def test_a_set_of_ids_finds_its_members_and_notes_which(
    members: set[str], ids: list[str | None]
) -> None:
    encoded = [one.encode(errors="replace") for one in members]
    offsets = np.cumsum([0, *map(len, encoded)])
    made = IdSet.of([document_digests(np.frombuffer(b"".join(encoded), np.uint8), offsets)] * 2)
    kept = IdSet.from_npy(made.to_npy())
    assert kept.sha256 == made.sha256
    ids = [None if one is None else one.encode(errors="replace").decode() for one in ids]
    known = {one.decode() for one in encoded}
    assert kept.find(pa.array(ids, pa.string())[1:]).tolist() == [one in known for one in ids[1:]]
    assert len(kept) == len(known)
    assert kept.found.sum() == len(known & set(ids[1:]))
    assert not kept.fresh().found.any()


def test_ids_that_share_half_a_digest_are_told_apart() -> None:
    pairs = np.array([[5, 1], [5, 2], [5, 4], [9, 0]], np.uint64)
    ids = IdSet(pairs)
    assert ids._find(np.array([[5, 4], [5, 3], [9, 0], [9, 1]], np.uint64)).tolist() == [1, 0, 1, 0]
    assert ids.found.tolist() == [False, False, True, True]


@given(st.lists(st.booleans(), max_size=60))
def test_what_was_found_survives_the_commit_record(found: list[bool]) -> None:
    assert unpack(pack(np.array(found, bool)), len(found)).tolist() == found
