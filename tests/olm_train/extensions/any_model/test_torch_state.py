"""Loader states with tensors in them survive a checkpoint's JSON, bit for bit."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from olm_data.errors import UsageError
from olm_train.checkpoint.state import from_json, to_json
from olm_train.extensions.any_model.torch_loader import from_plain, to_plain


def through_json(value: Any) -> Any:
    return from_plain(from_json(json.loads(json.dumps(to_json(to_plain(value), "x"))), "x"))


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6, dtype=torch.int64).reshape(2, 3),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.empty(0, dtype=torch.float32),
        torch.Generator().manual_seed(3).get_state(),
    ],
)
def test_tensors_come_back(value: torch.Tensor) -> None:
    back = through_json({"a": [value]})["a"][0]
    assert back.dtype == value.dtype
    assert torch.equal(back, value)


def test_arrays_generators_and_odd_keys_come_back() -> None:
    state = {0: "a", (1, 2): [None, True], "n": np.int64(3), "python": random.Random(1).getstate()}
    assert through_json(state) == state
    array = np.arange(6, dtype=">i4").reshape(3, 2)
    assert (through_json([array])[0] == array).all()
    numpy: Any = np.random.RandomState(1).get_state(legacy=False)
    again = np.random.RandomState(2)
    again.set_state(through_json(numpy))
    assert again.randint(1 << 30) == np.random.RandomState(1).randint(1 << 30)


def test_what_only_a_pickle_could_bring_back_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"data_loader\.a"):
        to_json(to_plain({"a": {1, 2}}), "data_loader")
