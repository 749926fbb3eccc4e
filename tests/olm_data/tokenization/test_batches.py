"""Documents between stages: BOS before and EOS after each of those chosen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.tokenization import batches
from olm_data.tokenization.batches import delimit

DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=12)


@given(DOCUMENTS, st.data(), st.sampled_from([None, 90]), st.sampled_from([None, 91]))
def test_delimiting_equals_the_plain_loop(
    documents: list[list[int]], data: st.DataObject, bos: int | None, eos: int | None
) -> None:
    chosen = np.array([data.draw(st.booleans()) for _ in documents], bool)
    ids = np.array([i for document in documents for i in document], np.uint32)
    offsets = np.cumsum([0, *map(len, documents)])
    expected = [
        [bos] * (bos is not None) + document + [eos] * (eos is not None)
        for document, keep in zip(documents, chosen, strict=True)
        if keep
    ]
    for long in (-1, batches.LONG_TOKENS):  # documents count as long, and do not
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batches, "LONG_TOKENS", long)
            got, ends = delimit(ids, offsets, chosen, bos=bos, eos=eos)
        assert got.tolist() == [i for document in expected for i in document]
        assert ends.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
