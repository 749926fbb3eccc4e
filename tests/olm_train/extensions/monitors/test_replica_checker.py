"""What several ranks hold is compared bit by bit; the odd ones are named."""

from __future__ import annotations

import pytest
import torch

from olm_train.extensions.monitors.replica_checker import digests, odd_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
def test_one_changed_bit_changes_the_sum(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).to(dtype).reshape(3, 4)
    changed = tensor.clone()
    bits = changed.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    bits[5] ^= 1
    assert digests({"w": tensor}) == digests({"w": tensor.clone()})
    assert digests({"w": tensor}) != digests({"w": changed})


WHOLE = ()


@pytest.mark.parametrize(
    ("sums", "problems"),
    [
        ([7, 7, 7], []),
        ([7, 8, 7], ["w: rank 1 differ from the others"]),
        ([7, 8, 9, 7, 7], ["w: ranks 1, 2 differ from the others"]),
        ([7, 8], ["w: ranks 0, 1 differ"]),
    ],
)
def test_the_ranks_that_are_not_as_most_are_named(sums: list[int], problems: list[str]) -> None:
    assert odd_ranks([{"w": (WHOLE, total)} for total in sums]) == problems


def test_different_pieces_of_a_tensor_are_not_compared() -> None:
    assert odd_ranks([{"w": ((0,), 1)}, {"w": ((1,), 2)}]) == []
