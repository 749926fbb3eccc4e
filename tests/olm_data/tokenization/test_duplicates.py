"""Exact duplicates: every copy but the first, by hash and size, in memory that does not grow."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from olm_data.tokenization.duplicates import fingerprints, later_copies

Key = tuple[int, int]

FEW_HASHES = st.sampled_from([0, 1, 7, 1 << 31, 1 << 32, (1 << 63) + 5, (1 << 64) - 1])
DOCUMENT = st.tuples(FEW_HASHES, st.integers(1, 3))
PARTS = st.lists(st.lists(DOCUMENT, max_size=12), max_size=6)


def reference(parts: list[list[Key]]) -> list[tuple[int, int]]:
    """(number, bytes) of each document whose key came before, in plain Python."""
    seen: set[Key] = set()
    found = []
    for number, key in enumerate(key for part in parts for key in part):
        if key in seen:
            found.append((number, key[1]))
        seen.add(key)
    return found


def arrays(parts: list[list[Key]]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [
        (np.array([h for h, _ in part], np.uint64), np.array([n for _, n in part], np.int64))
        for part in parts
    ]


def copies(parts: list[list[Key]], most: int) -> list[tuple[int, int]]:
    documents = sum(map(len, parts))
    with tempfile.TemporaryDirectory() as scratch:
        found = [
            pair
            for numbers, sizes in later_copies(arrays(parts), documents, Path(scratch), most=most)
            for pair in zip(numbers.tolist(), sizes.tolist(), strict=True)
        ]
        assert not list(Path(scratch).iterdir())  # spooled files are gone
    return sorted(found)


@given(PARTS, st.integers(1, 80))
@example([[(5, 1), (5, 2), (5, 1)]], 2)
def test_all_but_the_first_of_each_kind_are_found_however_few_fit_in_memory(
    parts: list[list[Key]], most: int
) -> None:
    assert copies(parts, most) == reference(parts)


def test_documents_with_the_same_hash_and_other_sizes_are_no_duplicates() -> None:
    assert copies([[(9, 1), (9, 2), (9, 1), (9, 3)]], 100) == [(2, 1)]


def test_one_text_repeated_far_beyond_what_fits_is_carried_once() -> None:
    parts = [[(3, 5)] * 400, [(1 << 40, 2)] * 3, [(3, 5)] * 400]
    assert copies(parts, 10) == reference(parts)


@given(st.lists(st.lists(DOCUMENT, max_size=8), max_size=4), st.randoms())
def test_the_sum_of_fingerprints_names_the_texts_in_any_order_and_any_parts(
    parts: list[list[Key]], random: object
) -> None:
    def total(keys: list[Key]) -> tuple[int, ...]:
        (hashes, sizes), *_ = arrays([keys])
        return tuple(fingerprints(hashes, sizes).sum(axis=0).tolist())

    keys = [key for part in parts for key in part]
    shuffled = keys.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert total(shuffled) == total(keys)
    if keys:
        assert total(keys[1:]) != total(keys)
        assert total([*keys, keys[0]]) != total(keys)
