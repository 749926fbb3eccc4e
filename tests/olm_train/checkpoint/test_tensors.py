"""Tensors and values of a checkpoint: every bit comes back, and what could not is refused."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.distributed import run_ranks
from support.runs import build_trainer, group_world, metrics
from support.training import digest, full
from torch import Tensor

from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.storage.store import Store
from olm_train.checkpoint import tensors as index
from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import Kind
from olm_train.checkpoint.resume import mapping_of
from olm_train.checkpoint.save import Contents, save_checkpoint
from olm_train.checkpoint.state import flatten, from_json, split, to_json
from olm_train.checkpoint.tensors import (
    DTYPES,
    Box,
    Chunk,
    Index,
    TensorEntry,
    TensorsFile,
    _tiles,
    fill,
    tensors_file,
)
from olm_train.distributed.world import World


def round_trip(state: Any, empty: Any, folder: Path) -> Any:
    contents = Contents(step=1, kind=Kind.final, state=state, documents={}, lock_digest="")
    place = save_checkpoint(folder, contents, World(), work_dir=folder)
    open_checkpoint(place, World()).load_tensors(empty, World())
    return empty


def test_tensors_of_every_dtype_and_shape_come_back_bit_for_bit(tmp_path: Path) -> None:
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


def test_the_library_of_the_container_opens_the_file_of_a_rank(tmp_path: Path) -> None:
    state = {"w": torch.randn(3, 2), "b": torch.ones(5, dtype=torch.bfloat16), "n": torch.tensor(7)}
    contents = Contents(
        step=1, kind=Kind.final, state={"model": state}, documents={}, lock_digest=""
    )
    place = save_checkpoint(tmp_path, contents, World(), work_dir=tmp_path)
    found = load_file(Path(place) / "model_and_optim" / tensors_file(0))
    assert found.keys() == {f"model.{name}" for name in state}
    assert all(torch.equal(found[f"model.{name}"], value) for name, value in state.items())


def test_boxes_of_one_tensor_have_names_of_their_own(tmp_path: Path) -> None:
    whole = torch.arange(12).reshape(6, 2)
    boxes = [Box("w", whole.dtype, (3, 2), (at, 0)) for at in (0, 3)]
    with TensorsFile(tmp_path / "x.safetensors", boxes) as file:
        for at in (0, 3):
            file.add(whole[at : at + 3])
    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(torch.cat([found["w"], found["w@3,0"]]), whole)


def test_a_file_of_before_without_a_header_is_read(tmp_path: Path) -> None:
    values = torch.randn(4, 3)
    (tmp_path / "rank00000.bin").write_bytes(values.numpy().tobytes())
    chunk = Chunk(0, 0, (0, 0), (4, 3))
    entry = TensorEntry(dtype="float32", shape=(4, 3), chunks=(chunk,))
    index = Index(files=("rank00000.bin",), tensors={"model.w": entry})
    index.check({"rank00000.bin": 48}, "index.json")
    found = torch.zeros(4, 3)
    fill({"model.w": found}, Store(str(tmp_path)), index)
    assert torch.equal(found, values)


VALUES = {
    "int": 3, "large": 1 << 200, "float": 0.1, "inf": -math.inf, "text": "\x1b[2J", "none": None,
    "bool": True, "bytes": b"\x00\xff", "betas": (0.9, 0.95), "list": [1, [2.5, {"a": b"x"}]],
}  # fmt: skip


def test_values_that_are_no_tensors_come_back_of_their_kind(tmp_path: Path) -> None:
    moment = torch.ones(2)
    state = {"optim": {"w": {**VALUES, "old": [moment, 5]}}}
    empty: Any = {"optim": {"w": {**dict.fromkeys(VALUES, 0), "old": [torch.zeros(2), 0]}}}
    found = round_trip(state, empty, tmp_path)["optim"]["w"]
    assert {name: found[name] for name in VALUES} == VALUES
    assert [type(found[name]) for name in VALUES] == [type(value) for value in VALUES.values()]
    assert found["old"][1] == 5
    assert torch.equal(found["old"][0], moment)


def digests(module: Any) -> list[str]:
    return [digest(part) for part in full(module).values()]


def two_runs(lock: Path, folder: Path) -> tuple[list[str], list[str], list[str]]:
    world = group_world()

    def run(name: str, stop: int) -> list[str]:
        trainer = build_trainer(
            lock,
            folder / name,
            "--trainer.callbacks.checkpointer={save_interval: 2, save_async: true}",
            "--trainer.callbacks.checkpointer.max_checkpoints=1",
            quiet=True,
            stop=stop,
            world=world,
        )
        trainer.fit()
        return digests(trainer.train_module)

    return run("whole", 5), run("stopped", 3), run("stopped", 5)


@pytest.mark.slow
def test_two_ranks_with_accumulation_resume_bit_for_bit_and_one_rank_reads_the_same(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    one, two = run_ranks(two_runs, 2, tiny_mixture, tmp_path)
    assert one == two
    whole, at_3, resumed = one
    assert resumed == whole != at_3
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "stopped")
    assert sorted(p.name for p in (tmp_path / "whole").glob("step*")) == [
        "step00000004", "step00000005",
    ]  # fmt: skip
    alone = build_trainer(tiny_mixture, tmp_path / "none").train_module
    tensors = alone.state_dict()
    open_checkpoint(tmp_path / "whole" / "step00000005", World()).load_tensors(tensors, World())
    assert digests(alone) == whole


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text("ab"), inner, max_size=1)
    ),
    max_leaves=8,
)


@given(plain)
def test_every_plain_value_survives_json(value: Any) -> None:
    index = Index(values={"a": to_json(value, "a")})
    again = Index.decode(index.encode(), "index.json")
    assert repr(from_json(again.values["a"], "a")) == repr(value)


@pytest.mark.parametrize("value", [object(), {1: 2}, {"$bytes": 1}, torch.float32, 1j, {1, 2}])
def test_what_only_a_pickle_could_bring_back_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UsageError, match=r"a checkpoint cannot hold optim\.x"):
        to_json([value], "optim.x")


@pytest.mark.parametrize(
    "value", [{"$bytes": "?"}, {"$int": "x"}, {"$float": "1"}, {"$os": "x"}, {"$tuple": 1, "b": 2}]
)
def test_a_value_of_no_known_kind_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="of no known kind"):
        from_json(value, "a")


def nested(levels: int, kind: type) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = kind([value])
    return value


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_is_written_can_be_read_however_deep_and_deeper_is_refused(kind: type) -> None:
    value = nested(30, kind)
    index = Index(values={"a": to_json(value, "a")})
    assert from_json(Index.decode(index.encode(), "index.json").values["a"], "a") == value
    for levels in (31, 5000):
        with pytest.raises(UsageError, match="more than 30 levels deep"):
            to_json(nested(levels, kind), "a")


@pytest.mark.parametrize("value", ["\ud800", {"\udcff": 1}, [{"a": "x\udfff"}]])
def test_a_text_that_json_cannot_give_back_is_not_written(value: Any) -> None:
    with pytest.raises(UsageError, match=r"a checkpoint cannot hold callbacks\.mine"):
        to_json({"mine": value}, "callbacks")


@pytest.mark.parametrize(
    "flat", [{"": 1}, {"a\x1b": 1}, {"a" * 1025: 1}, {"a": torch.zeros([1] * 9)}]
)
def test_what_no_index_may_hold_is_refused_when_it_is_saved(flat: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="a checkpoint cannot hold"):
        split(flat)


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match=r"have the name a\.b"):
        flatten({"a": {"b": 1}, "a.b": 2})


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


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (None, object),
        (3, object),
        ({3: 4}, object),
        ({"x": 3}, Tensor),
        ({"x": [1]}, Tensor),
        ({"x": "text"}, bytes),
    ],
)
def test_what_a_checkpoint_would_lose_is_refused(given: Any, kind: type) -> None:
    with pytest.raises(UsageError, match="of the callback 'mine' returned a"):
        mapping_of("mine", "state_dict", given, kind)


def test_what_it_holds_is_returned_as_it_is() -> None:
    tensors = {"x": torch.ones(2)}
    assert mapping_of("mine", "tensors", tensors, Tensor) is tensors


def test_the_reader_of_the_page_gives_every_bit(repository: Path, tmp_path: Path) -> None:
    page = (repository / "docs" / "reference" / "checkpoint.md").read_text()
    found: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], found)
    state = {
        "model": {"a": torch.randn(5, 3), "b": torch.arange(4), "c": torch.randn(2, 1, 3).double()},
        "optim": {"step": torch.tensor(7.0), "none": torch.empty(0, 3), "count": 3},
    }
    contents = Contents(step=1, kind=Kind.final, state=state, documents={}, lock_digest="")
    folder = save_checkpoint(tmp_path, contents, World(), work_dir=tmp_path)
    for name, entry in open_checkpoint(folder, World()).index.tensors.items():
        part, _, key = name.partition(".")
        tensor = found["read_tensor"](f"{folder}/model_and_optim", name)
        assert tensor.tobytes() == state[part][key].numpy().tobytes()  # type: ignore[attr-defined]
        assert tensor.shape == entry.shape
