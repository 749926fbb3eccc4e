"""JSON is read within bounds: depth, digits, control bytes, keys that stand once."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data import bounded_json
from olm_data.bounded_json import MAX_DEPTH, MalformedJson, check, decode
from olm_data.storage.store import Store, read_json

DEEP = {
    "lists": b"[" * 200_000 + b"]" * 200_000,
    "objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "open": b"[" * 300_000,
    "inside": b'{"format": "olm-plan", "version": 1, "inputs": ' + b"[" * 9000 + b"]" * 9000 + b"}",
    "wide": b'{"version": ' + b"9" * 5000 + b"}",
    "zeros": bytes(100_000),
    "twice": b'{"format": "olm-plan", "format": "olm-job"}',
}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2**64 - 1) | st.text(max_size=8) | st.floats(-9, 9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)


@given(value=VALUES, piece=st.integers(1, 40), small=st.sampled_from([0, 1 << 16]))
def test_what_json_writes_is_read_back_however_it_is_cut(
    value: object, piece: int, small: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_json, "PIECE", piece)
        patch.setattr(bounded_json, "_SMALL", small)
        for ascii in (True, False):
            assert decode(json.dumps(value, ensure_ascii=ascii).encode()) == value


@pytest.mark.parametrize("name", DEEP)
def test_malformed_json_is_one_error(name: str) -> None:
    with pytest.raises(MalformedJson):
        decode(DEEP[name])


@pytest.mark.parametrize("piece", [1, 7, MAX_DEPTH, bounded_json.PIECE])
def test_depth_is_bounded_at_the_limit_and_not_before(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_json, "PIECE", piece)
    decode(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(MalformedJson, match="levels of nesting"):
        decode(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_value_or_malformed(data: bytes) -> None:
    with contextlib.suppress(MalformedJson):
        decode(data)


def test_a_large_file_of_brackets_is_refused_at_the_cost_of_a_piece(tmp_path: Path) -> None:
    with open(tmp_path / "x.json", "wb") as file:
        file.write(b"[" * (16 << 20))
    with open(tmp_path / "z.json", "wb") as file:
        file.truncate(200 << 20)
    for name in ("x.json", "z.json"):
        tracemalloc.start()
        with pytest.raises(MalformedJson):
            check([read_json(Store(tmp_path), name)])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 50 << 20
