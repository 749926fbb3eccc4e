"""torch.compile with static shapes, for any number of kinds of call.

    arguments -> their kind: shapes, dtypes, numbers, gradients or none -> a code object a kind

The compiler counts how often it compiles a code object again, and gives up at the eighth time.
With static shapes, each sequence length, kind of layer and mode (training, evaluation) is another
time. So each kind of call gets a copy of the function's code object. Copies are shared: layers
alike, and all models of a process, share one compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor


class CompiledByKind:
    """A function, compiled once for each kind of call.

    Args:
        function: a plain function.
        owner: first argument of each call, if it is a method.
        options: of `torch.compile`.
    """

    def __init__(
        self, function: Callable[..., Any], owner: object | None = None, **options: Any
    ) -> None:
        assert isinstance(function, FunctionType), function
        self._function, self._owner, self._options = function, owner, options
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        kind = (torch.is_grad_enabled(), kind_of(args), kind_of(kwargs))
        if kind not in self._compiled:
            copy: Callable[..., Any] = _own_code(self._function, kind)
            if self._owner is not None:
                copy = MethodType(copy, self._owner)
            self._compiled[kind] = torch.compile(copy, dynamic=False, **self._options)
        return self._compiled[kind](*args, **kwargs)


def kind_of(value: Any) -> Hashable:
    """Return what static graphs are made for: of a tensor its shape and type, of numbers all."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, (tuple, list)):
        return tuple(map(kind_of, value))
    if isinstance(value, dict):
        return tuple((name, kind_of(item)) for name, item in value.items())
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__qualname__


@cache
def _own_code(function: FunctionType, kind: Hashable) -> FunctionType:
    """Return a copy of a function with a code object of its own, one for each kind."""
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
