"""What callbacks give to a checkpoint, where it is something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from olm_data.errors import UsageError
from olm_train.checkpoint.resume import mapping_of


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
