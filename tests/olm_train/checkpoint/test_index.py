"""The index of the tensors: any state comes back bit for bit; what does not tile is refused."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import UsageError, ValidationError
from olm_train.checkpoint.index import DTYPES, Chunk, Index, TensorEntry, _tiles
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import Kind
from olm_train.checkpoint.save import Contents, save_checkpoint
from olm_train.checkpoint.state import flatten, from_json, split, to_json
from olm_train.distributed.world import World


def round_trip(state: Any, empty: Any, folder: Path) -> Any:
    contents = Contents(step=1, kind=Kind.final, state=state, documents={}, lock_digest="")
    place = save_checkpoint(folder, contents, World(), work_dir=folder)
    open_checkpoint(place, World()).load_tensors(empty, World())
    return empty


def test_s1_tensors_of_every_dtype_and_shape_come_back_bit_for_bit(tmp_path: Path) -> None:
    shapes = [(), (0,), (3, 0), (5,), (2, 3), (2, 1, 3, 2)]
    raw = torch.randint(0, 2, (12 * 16,), dtype=torch.uint8)
    state = {
        f"{name} {shape}": raw[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        for name, dtype in DTYPES.items()
        for shape in shapes
    }
    state["turned"] = torch.arange(6).reshape(2, 3).T
    empty = {name: torch.zeros_like(value) for name, value in state.items()}
    found = round_trip({"model": state}, {"model": empty}, tmp_path)["model"]
    for name, value in state.items():
        one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (value, found[name]))
        assert torch.equal(one, other), name


VALUES = {
    "int": 3, "large": 1 << 200, "float": 0.1, "inf": -math.inf, "text": "\x1b[2J", "none": None,
    "bool": True, "bytes": b"\x00\xff", "betas": (0.9, 0.95), "list": [1, [2.5, {"a": b"x"}]],
}  # fmt: skip


def test_s1_values_that_are_no_tensors_come_back_of_their_kind(tmp_path: Path) -> None:
    moment = torch.ones(2)
    state = {"optim": {"w": {**VALUES, "old": [moment, 5]}}}
    empty: Any = {"optim": {"w": {**dict.fromkeys(VALUES, 0), "old": [torch.zeros(2), 0]}}}
    found = round_trip(state, empty, tmp_path)["optim"]["w"]
    assert {name: found[name] for name in VALUES} == VALUES
    assert [type(found[name]) for name in VALUES] == [type(value) for value in VALUES.values()]
    assert found["old"][1] == 5
    assert torch.equal(found["old"][0], moment)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text("ab"), inner, max_size=1)
    ),
    max_leaves=8,
)


@given(plain)
def test_s1_every_plain_value_survives_json(value: Any) -> None:
    index = Index(values={"a": to_json(value, "a")})
    again = Index.decode(index.encode(), "index.json")
    assert repr(from_json(again.values["a"], "a")) == repr(value)


@pytest.mark.parametrize("value", [object(), {1: 2}, {"$bytes": 1}, torch.float32, 1j, {1, 2}])
def test_s1_what_only_a_pickle_could_bring_back_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UsageError, match=r"a checkpoint cannot hold optim\.x"):
        to_json([value], "optim.x")


@pytest.mark.parametrize(
    "value", [{"$bytes": "?"}, {"$int": "x"}, {"$float": "1"}, {"$os": "x"}, {"$tuple": 1, "b": 2}]
)
def test_s1_a_value_of_no_known_kind_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="of no known kind"):
        from_json(value, "a")


def nested(levels: int, kind: type) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = kind([value])
    return value


@pytest.mark.parametrize("kind", [list, tuple])
def test_s8_what_is_written_can_be_read_however_deep_and_deeper_is_refused(kind: type) -> None:
    value = nested(30, kind)
    index = Index(values={"a": to_json(value, "a")})
    assert from_json(Index.decode(index.encode(), "index.json").values["a"], "a") == value
    for levels in (31, 5000):
        with pytest.raises(UsageError, match="more than 30 levels deep"):
            to_json(nested(levels, kind), "a")


@pytest.mark.parametrize("value", ["\ud800", {"\udcff": 1}, [{"a": "x\udfff"}]])
def test_s8_a_text_that_json_cannot_give_back_is_not_written(value: Any) -> None:
    with pytest.raises(UsageError, match=r"a checkpoint cannot hold callbacks\.mine"):
        to_json({"mine": value}, "callbacks")


@pytest.mark.parametrize(
    "flat", [{"": 1}, {"a\x1b": 1}, {"a" * 1025: 1}, {"a": torch.zeros([1] * 9)}]
)
def test_s8_what_no_index_may_hold_is_refused_when_it_is_saved(flat: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="a checkpoint cannot hold"):
        split(flat)


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match=r"have the name a\.b"):
        flatten({"a": {"b": 1}, "a.b": 2})


boxes = st.lists(
    st.tuples(*[st.tuples(st.integers(0, 2), st.integers(1, 3)) for _ in range(2)]), max_size=6
)


@given(st.tuples(st.integers(1, 4), st.integers(1, 4)), boxes)
def test_s1_chunks_tile_a_shape_if_every_element_is_in_exactly_one(
    shape: tuple[int, int], found: list[tuple[tuple[int, int], tuple[int, int]]]
) -> None:
    chunks = [Chunk(0, 0, tuple(a for a, _ in box), tuple(n for _, n in box)) for box in found]
    seen = [cell for box in found for cell in itertools.product(*(range(a, a + n) for a, n in box))]
    whole = list(itertools.product(*map(range, shape)))
    assert _tiles(shape, chunks) == (sorted(seen) == whole)


@given(st.data())
def test_s1_every_cut_of_a_shape_tiles_it_and_no_other_set(data: st.DataObject) -> None:
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
def test_s1_tensors_that_the_bytes_cannot_be_are_refused(
    tensors: dict[str, TensorEntry], why: str
) -> None:
    index = Index(files=("rank00000.bin",), tensors=tensors, values={"v": 1})
    with pytest.raises(ValidationError) as refused:
        index.check({"rank00000.bin": 8}, "index.json")
    assert why in str(refused.value.why)
    Index(files=("rank00000.bin",), tensors={"a": entry(FIRST)}).check({"rank00000.bin": 4}, "i")


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
def test_s1_bytes_that_are_no_index_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Index.decode(data, "index.json")
    assert why in str(refused.value.why)
