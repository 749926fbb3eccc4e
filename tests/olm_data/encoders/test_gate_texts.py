"""The sample of the parity gate: documents that fit, however long the first is."""

from __future__ import annotations

import numpy as np

from olm_data.encoders.base import concatenate
from olm_data.encoders.gate import SAMPLE_BYTES, sample_of


def test_a_first_document_longer_than_the_sample_does_not_leave_it_empty() -> None:
    rows = [b"x" * (SAMPLE_BYTES + 1), b"one", b"two", b"y" * (SAMPLE_BYTES - 5), b"three"]
    data, offsets = sample_of(*concatenate(rows))
    assert data.tobytes() == b"onetwothree"
    assert offsets.tolist() == [0, 3, 6, 11]


def test_the_sample_is_bounded() -> None:
    data, offsets = sample_of(*concatenate([b"a" * 1000] * 1000))
    assert SAMPLE_BYTES - 1000 < len(data) <= SAMPLE_BYTES
    assert np.all(np.diff(offsets) == 1000)
