"""The index of the tensors: what does not tile, or is no index, is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import InputError, ValidationError
from olm_train.checkpoint import tensors as index
from olm_train.checkpoint.tensors import Chunk, Index, TensorEntry, _tiles

boxes = st.lists(
    st.tuples(*[st.tuples(st.integers(0, 2), st.integers(1, 3)) for _ in range(2)]), max_size=6
)


@given(st.tuples(st.integers(1, 4), st.integers(1, 4)), boxes)
def test_chunks_tile_a_shape_if_every_element_is_in_exactly_one(
    shape: tuple[int, int], found: list[tuple[tuple[int, int], tuple[int, int]]]
) -> None:
    chunks = [Chunk(0, 0, tuple(a for a, _ in box), tuple(n for _, n in box)) for box in found]
    seen = [cell for box in found for cell in itertools.product(*(range(a, a + n) for a, n in box))]
    whole = list(itertools.product(*map(range, shape)))
    assert _tiles(shape, chunks) == (sorted(seen) == whole)


@given(st.data())
def test_every_cut_of_a_shape_tiles_it_and_no_other_set(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    cuts = [sorted({0, n, *data.draw(st.sets(st.integers(0, n)))}) for n in shape]
    grid = [
        Chunk(0, 0, tuple(a for a, _ in box), tuple(b - a for a, b in box))
        for box in itertools.product(*(itertools.pairwise(cut) for cut in cuts))
    ]
    assert _tiles(shape, grid)
    if len(grid) > 1:
        assert not _tiles(shape, grid[1:])
        assert not _tiles(shape, [*grid[1:], grid[1]])


def entry(*chunks: Chunk, shape: tuple[int, ...] = (4,), dtype: str = "uint8") -> TensorEntry:
    return TensorEntry(dtype=dtype, shape=shape, chunks=chunks)


FIRST = Chunk(0, 0, (0,), (4,))


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"a": entry(FIRST, dtype="object")}, "has the dtype object"),
        ({"a": entry(FIRST, dtype="int64")}, "beyond the end of its file"),
        ({"a": entry(Chunk(1, 0, (0,), (4,)))}, "beyond the end of its file"),
        ({"a": entry(Chunk(0, 5, (0,), (4,)))}, "beyond the end of its file"),
        ({"a": entry(FIRST), "b": entry(FIRST)}, "two chunks share bytes"),
        ({"a": entry(FIRST, shape=(1,) * 9)}, "9 dimensions"),
        ({"a": entry(FIRST, shape=(1 << 62,))}, "do not tile"),
        ({"a\x1b": entry(FIRST)}, "not the name of a tensor"),
        ({"": entry(FIRST)}, "not the name of a tensor"),
        ({"a" * 2000: entry(FIRST)}, "not the name of a tensor"),
        ({"v": entry(FIRST)}, "not the name of a tensor"),
    ],
)
def test_tensors_that_the_bytes_cannot_be_are_refused(
    tensors: dict[str, TensorEntry], why: str
) -> None:
    index = Index(files=("rank0.safetensors",), tensors=tensors, values={"v": 1})
    with pytest.raises(ValidationError) as refused:
        index.check({"rank0.safetensors": 8}, "index.json")
    assert why in str(refused.value.why)
    Index(files=("rank0.safetensors",), tensors={"a": entry(FIRST)}).check(
        {"rank0.safetensors": 4}, "i"
    )


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"[" * 100_000, "levels of nesting"),
        (b'{"values":{"a":' + b"[" * 100_000, "levels of nesting"),
        (b'{"tensors":{"a":{"dtype":"x","shape":[-1],"chunks":[]}}}', ">= 0"),
        (b'{"tensors":{"a":{"dtype":"x","shape":[1e400],"chunks":[]}}}', ""),
        (b"{}\n", "not in the one spelling"),
        (Index().encode().replace(b'"version":1', b'"version":9'), "version 9"),
        (Index().encode()[:-1], "not in the one spelling"),
        (b"\xff", ""),
    ],
)
def test_bytes_that_are_no_index_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Index.decode(data, "index.json")
    assert why in str(refused.value.why)


def test_an_index_that_could_not_be_read_again_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = Index().encode()
    monkeypatch.setattr(index, "MAX_BYTES", len(data))
    assert Index.decode(Index().encode(), "here") == Index()
    monkeypatch.setattr(index, "MAX_BYTES", len(data) - 1)
    with pytest.raises(InputError, match="the file would have"):
        Index().encode()
