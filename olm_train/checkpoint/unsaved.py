"""What training changes in a model or a loss and no checkpoint holds, found by looking twice.

    before the first step: Unsaved(parts)  after it: changed() -> ["model.noise (a generator)"]

A checkpoint holds parameters, persistent buffers and the optimiser's state. Beside them a part may
keep buffers that are not persistent, tensors that are no buffers, generators of random numbers,
plain values and containers of these: those that a step has changed would begin anew where a run
goes on. What a step first makes, such as an activation that is kept for the loss, is no state.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OF_ANY_MODULE = vars(nn.Module()).keys()
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class Unsaved:
    """The values before a step of what is in no checkpoint.

    Args:
        parts: modules or other objects by name; of the module "model" the persistent buffers are
            saved.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = parts
        self._before = {name: (kind, _copy(value)) for name, kind, value in self._found()}

    def changed(self) -> list[str]:
        """Return what has another value by now, by name, and what it is."""
        now = {name: value for name, _, value in self._found()}
        return [
            f"{name} ({kind})"
            for name, (kind, value) in self._before.items()
            if name in now and not _same(value, now[name])
        ]

    def _found(self) -> Iterator[tuple[str, str, Any]]:
        for name, part in self._parts.items():
            if not isinstance(part, nn.Module):
                yield from _of_object(name, part)
                continue
            for path, module in part.named_modules(prefix=name):
                yield from _of_object(path, module)
                for key, buffer in module.named_buffers(recurse=False):
                    saved = name == "model" and key not in module._non_persistent_buffers_set
                    if not saved and not buffer.is_meta:
                        yield f"{path}.{key}", "a buffer that is not saved", buffer


def _of_object(path: str, part: object) -> Iterator[tuple[str, str, Any]]:
    for key, value in getattr(part, "__dict__", {}).items():
        if key in _OF_ANY_MODULE:
            continue
        if isinstance(value, Tensor) and not value.is_meta:
            yield f"{path}.{key}", "a tensor that is no buffer", value
        elif (state := _state(value)) is not None:
            yield f"{path}.{key}", _kind(value), state


def _state(value: object) -> Any:
    """Return what can be compared later: of generators, numbers, texts, and containers of them."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return str(value.get_state())
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return [(key, _state(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, deque)):
        return [_state(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, np.generic)) else None


def _kind(value: object) -> str:
    if isinstance(value, _GENERATORS):
        return "a generator"
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    return "a number" if number else f"a {type(value).__name__}"


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)
