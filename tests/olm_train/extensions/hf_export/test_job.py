"""What an export is made of: sizes as people write them, weights that the dtype can hold."""

from __future__ import annotations

import pytest
import torch

from olm_data.errors import UsageError, ValidationError
from olm_train.checkpoint.tensors import Box
from olm_train.extensions.hf_export.job import parse_size, rounded


def test_weights_that_are_not_finite_in_the_dtype_are_refused() -> None:
    large = torch.tensor([1.0, 70_000.0])
    with pytest.raises(ValidationError, match="1 weights of w are not finite any more"):
        rounded(large, Box("w", torch.float16, (2,)))
    with pytest.raises(ValidationError, match="1 weights of w are not finite"):
        rounded(torch.tensor([1.0, torch.nan]), Box("w", torch.float32, (2,)))
    assert rounded(large, Box("w", torch.bfloat16, (2,))).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500 MB", 5 * 10**8), ("1GiB", 1 << 30), ("70", 70)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5", "0GB", "GB", "5TBs", "-1GB", "1e400"][2:])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)
