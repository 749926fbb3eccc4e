"""What training changes in a model or a loss and no checkpoint holds, found by looking twice.

    before the first step: Unsaved(parts)  after it: changed() -> ["model.noise (a generator)"]

A checkpoint holds parameters, persistent buffers and the optimiser's state. Beside them a part may
keep buffers that are not persistent, generators of random numbers, and plain numbers: those that a
step has changed would begin anew where a run goes on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


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
        if isinstance(value, torch.Generator):
            yield f"{path}.{key}", "a generator", value.get_state()
        elif isinstance(value, random.Random):
            yield f"{path}.{key}", "a generator", value.getstate()
        elif isinstance(value, np.random.Generator):
            yield f"{path}.{key}", "a generator", repr(value.bit_generator.state)
        elif not key.startswith("_") and type(value) in (int, float):
            yield f"{path}.{key}", "a number", value


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    return bool(one == other)
