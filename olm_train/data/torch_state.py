"""The state of a data loader, with tensors and arrays in it, as values that a checkpoint holds.

    {"g": tensor, 3: array} --to_plain--> mappings with text as keys, lists, tuples, bytes, numbers
                            <-from_plain--

What is neither is left as it is, and refused by whoever writes it. Never: a pickle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

TENSOR, ARRAY, KEYED = "torch.Tensor", "numpy.ndarray", "keys that are no text"


def to_plain(value: Any) -> Any:
    """Return a value with its tensors, arrays and NumPy numbers spelt out."""
    if isinstance(value, Tensor):
        array = value.detach().cpu().contiguous()
        return {TENSOR: [str(array.dtype)[6:], list(array.shape), _bytes(array)]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {ARRAY: [value.dtype.str, list(value.shape), value.tobytes()]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        if any(not isinstance(key, str) for key in value):
            return {KEYED: [[to_plain(key), to_plain(item)] for key, item in value.items()]}
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(to_plain, value)) if type(value) in (list, tuple) else value
    return value


def from_plain(value: Any) -> Any:
    """Return what `to_plain` made plain."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(from_plain, value))
    if not isinstance(value, dict):
        return value
    if value.keys() == {TENSOR}:
        dtype, shape, data = value[TENSOR]
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        return flat.view(getattr(torch, dtype)).reshape(shape)
    if value.keys() == {ARRAY}:
        kind, shape, data = value[ARRAY]
        return np.frombuffer(bytearray(data), dtype=kind).reshape(shape)
    if value.keys() == {KEYED}:
        return {from_plain(key): from_plain(item) for key, item in value[KEYED]}
    return {key: from_plain(item) for key, item in value.items()}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
