"""A block of a parameter is read from the blocks of theirs that it is made of, and no others."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from olm_train.extensions.hf.tensors import TensorMap, TensorPart

MAP = TensorMap(
    "w", (11, 3), (TensorPart("q", (4, 3), 0, 4), TensorPart("k", (3, 2), 4, 2, transposed=True),
                   TensorPart("v", (2, 3), 6, 2)),
)  # fmt: skip
"""Eight rows of parts, and three that pad."""
THEIRS = {part.name: torch.randn(part.shape) for part in MAP.parts}
WHOLE = torch.cat((THEIRS["q"], THEIRS["k"].T, THEIRS["v"], torch.zeros(3, 3)))


def read(name: str, block: tuple[slice, ...]) -> Tensor:
    return THEIRS[name][block]


@given(
    st.tuples(st.integers(0, 11), st.integers(0, 11)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_any_block_is_that_of_the_whole(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    where = (slice(*rows), slice(*columns))
    block = MAP.from_theirs(read, where, dtype=torch.float32)
    assert torch.equal(block, WHOLE[where])
    elements = sum(
        (s.source[0].stop - s.source[0].start) * (s.source[1].stop - s.source[1].start)
        for s in MAP.reads(where)
    )
    assert elements == WHOLE[:8][where].numel()


def test_the_whole_gives_their_tensors_back() -> None:
    whole = MAP.from_theirs(read, dtype=torch.float32)
    back = {part.name: part.of(whole[part.ours]) for part in MAP.parts}
    assert all(
        torch.equal(back[name], value) and back[name].is_contiguous()
        for name, value in THEIRS.items()
    )


EXPERTS = TensorMap(
    "experts", (4, 6, 3), tuple(
        TensorPart(f"{expert}.{name}", (3, 3), expert, 1, within=slice(first, first + 3))
        for expert in range(4)
        for name, first in (("gate", 0), ("up", 3))
    ),
)  # fmt: skip
APART = {part.name: torch.randn(part.shape) for part in EXPERTS.parts}
STACKED = torch.stack([torch.cat((APART[f"{n}.gate"], APART[f"{n}.up"])) for n in range(4)])


@given(st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)) for n in EXPERTS.shape)))
def test_any_block_of_experts_is_read_from_those_experts_alone(
    bounds: tuple[tuple[int, int], ...],
) -> None:
    where = tuple(slice(*each) for each in bounds)
    read_elements = 0

    def read_one(name: str, block: tuple[slice, ...]) -> Tensor:
        nonlocal read_elements
        read_elements += APART[name][block].numel()
        return APART[name][block]

    block = EXPERTS.from_theirs(read_one, where, dtype=torch.float32)
    assert torch.equal(block, STACKED[where])
    assert read_elements == block.numel()


def test_experts_give_their_tensors_back() -> None:
    back = {part.name: part.of(STACKED[part.ours]) for part in EXPERTS.parts}
    assert back.keys() == APART.keys()
    assert all(torch.equal(back[name], value) for name, value in APART.items())
