"""Promises of the summaries: exact where they say so, within their error elsewhere, mergeable."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.extensions.stats.count import Frequent, LogHistogram, Quantiles, TopK

lengths = st.lists(st.integers(1, 2**50), max_size=60)


@given(lengths, st.integers(0, 60))
def test_a_histogram_counts_and_sums_every_value_once_whole_or_in_parts(
    values: list[int], cut: int
) -> None:
    whole, first, second = LogHistogram(), LogHistogram(), LogHistogram()
    whole.add(np.array(values, np.int64))
    first.add(np.array(values[:cut], np.int64))
    second.add(np.array(values[cut:], np.int64))
    first.merge(second)
    assert whole.bins() == first.bins()
    for octaves in (False, True):
        bins = whole.bins(octaves=octaves)
        assert sum(count for _, _, count, _ in bins) == len(values)
        assert sum(total for *_, total in bins) == sum(values)
        for low, high, count, total in bins:
            inside = [value for value in values if low <= value <= high]
            assert (count, total) == (len(inside), sum(inside))
        for (_, high, *_), (low, *_) in pairwise(bins):
            assert low == high + 1


def test_octaves_are_powers_of_two() -> None:
    histogram = LogHistogram()
    histogram.add(np.array([1, 2, 3, 4, 7, 8, 1023, 1024]))
    bins = histogram.bins(octaves=True)
    assert bins[:4] == [(1, 1, 1, 1), (2, 3, 2, 5), (4, 7, 2, 11), (8, 15, 1, 8)]
    assert bins[-2:] == [(512, 1023, 1, 1023), (1024, 2047, 1, 1024)]
    assert LogHistogram().bins() == []


numbers = st.one_of(
    st.integers(-(2**62), 2**62).map(float), st.floats(allow_nan=False, allow_infinity=False)
)


@given(st.lists(numbers, min_size=1, max_size=80), st.floats(0, 1), st.integers(0, 80))
def test_quantiles_are_within_one_percent_whole_or_in_parts(
    values: list[float], share: float, cut: int
) -> None:
    sketch, other = Quantiles(), Quantiles()
    sketch.add(np.array(values[:cut]))
    other.add(np.array(values[cut:]))
    sketch.merge(other)
    exact = float(np.sort(values)[int(np.floor(share * (len(values) - 1)))])
    assert sketch.at(share) == pytest.approx(exact, rel=0.0101, abs=1e-320)
    assert (sketch.least, sketch.most, sketch.count) == (min(values), max(values), len(values))


def test_numbers_that_are_none_are_counted_apart() -> None:
    sketch = Quantiles()
    sketch.add(np.array([np.nan, np.inf, 3.0]))
    assert (sketch.count, sketch.odd, sketch.at(0.5)) == (1, 2, 3.0)
    assert Quantiles().at(0.5) == 0


@given(
    st.lists(st.text("abcdef", max_size=2), max_size=200), st.integers(1, 12), st.integers(0, 200)
)
def test_frequent_values_are_never_overcounted_nor_lost(
    values: list[str], most: int, cut: int
) -> None:
    summary, other = Frequent(most), Frequent(most)
    summary.add(Counter(values[:cut]))
    other.add(Counter(values[cut:]))
    summary.merge(other)
    exact, found = Counter(values), dict(summary.top(10**6))
    assert summary.total == len(values)
    assert len(found) <= most
    for value, count in exact.items():
        assert count - summary.error <= found.get(value, 0) <= count
    assert summary.error * (most + 1) <= len(values)
    if len(exact) <= most:
        assert found == exact
        assert summary.distinct == len(exact)


@given(
    st.lists(st.integers(0, 5).map(float), max_size=100), st.integers(1, 10), st.integers(0, 100)
)
def test_the_k_smallest_are_exact_and_ties_go_to_the_lower_number(
    keys: list[float], k: int, cut: int
) -> None:
    top, other = TopK(k), TopK(k)
    where = np.arange(len(keys))
    top.add(np.array(keys[cut:]), where[cut:])
    other.add(np.array(keys[:cut]), where[:cut])
    top.merge(other)
    assert top.items() == sorted(zip(keys, where.tolist(), strict=True))[:k]
