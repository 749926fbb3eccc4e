"""The dtype of a token file is believed only where its bytes can be ids of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.importing import EOS, make

from olm_data.errors import InputError, UsageError
from olm_data.extensions.importing.token_files import DTYPES, advice, defect, looks_like

WRITTEN = [dtype.str for dtype in DTYPES]


def text_like(seed: int, count: int, vocab: int, eos: int) -> np.ndarray:
    """Return ids as tokenizers give them: common tokens low, and an EOS id now and then."""
    draw = np.random.default_rng(seed)
    ids = np.minimum((vocab ** draw.random(count)).astype(np.int64), vocab - 1)
    ids[draw.random(count) < 0.02] = eos
    return ids


@settings(max_examples=150)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(8, 3_000),
    st.sampled_from([300, 5_000, 32_000, 50_257, 65_024, 65_536, 100_278, 262_144]),
    st.booleans(),
    st.sampled_from(WRITTEN),
    st.sampled_from(["uint16", "uint32"]),
)
@example(1, 12, 50_257, True, "<i8", "uint32")
@example(1, 3_000, 65_536, True, ">u2", "uint16")
def test_ids_written_with_another_dtype_are_never_taken(
    seed: int, count: int, vocab: int, first_ends: bool, written: str, said: str
) -> None:
    if vocab > 1 << 16 and "uint16" in (np.dtype(written).name, said):
        return
    ids = text_like(seed, count, vocab, 0 if first_ends else vocab - 1)
    if (ids < 256).sum() > count - 4:
        return  # as good as no high byte: nothing tells the orders apart
    data = ids.astype(written).tobytes()
    right = np.dtype(written) == np.dtype(said)
    if right or count > 100 or written != ">u2" or said != "uint16":  # an order needs repetitions
        assert (defect(data, np.dtype(said), vocab) is None) == right
    if count > 100 or not written.startswith(">"):
        assert looks_like(data, vocab) == np.dtype(written)


@settings(max_examples=50)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(200, 3_000),
    st.sampled_from([5_000, 50_257, 65_024, 65_536]),
    st.booleans(),
    st.floats(0, 0.9),
    st.sampled_from(WRITTEN),
)
@example(1, 3_000, 65_536, False, 0.7, ">u2")
def test_padding_does_not_hide_what_is_written(
    seed: int, count: int, vocab: int, first_pads: bool, share: float, written: str
) -> None:
    padding = 0 if first_pads else vocab - 1
    ids = text_like(seed, count, vocab, padding)
    ids = np.append(ids, np.full(int(count * share / (1 - share)), padding))
    data = ids[: len(ids) // 8 * 8].astype(written).tobytes()
    for said in ("uint16", "uint32"):
        right = np.dtype(written) == np.dtype(said)
        assert (defect(data, np.dtype(said), vocab) is None) == right


@pytest.mark.parametrize("size", [0, 2, 4, 8, 14, 24])
def test_a_few_values_are_nothing_to_go_by(size: int) -> None:
    data = np.array([5, 0, 7, 0] * 6, "<u2").tobytes()[:size]
    assert (defect(data, np.dtype("uint16"), 1_000) is None) == (size < 16)


def test_a_sidecar_proves_the_width_so_that_zeros_in_turn_are_tokens() -> None:
    data = np.array([5, 0] * 500, "<u2").tobytes()
    assert defect(data, np.dtype("uint16"), 1_000)
    assert defect(data, np.dtype("uint16"), 1_000, width_known=True) is None


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("said", ["uint16", "uint32"])
def test_an_import_has_the_ids_of_the_file_or_says_what_it_looks_like(
    written: str, said: str, tmp_path: Path
) -> None:
    ids = text_like(7, 400, EOS, EOS)
    ids.astype(written).tofile(tmp_path / "a.npy")
    if np.dtype(written) == np.dtype(said):
        assert make(tmp_path / "a.npy", tmp_path / "out", dtype=said).tokens == 400
        return
    with pytest.raises(InputError) as refused:
        make(tmp_path / "a.npy", tmp_path / "out", dtype=said)
    assert advice(np.dtype(written)) in str(refused.value)
    with pytest.raises(UsageError) as asked:
        make(tmp_path / "a.npy", tmp_path / "asked")
    assert advice(np.dtype(written)) in str(asked.value)
    assert not (tmp_path / "asked").exists()
