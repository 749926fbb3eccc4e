"""The state of a train module as a checkpoint keeps it: flat, tensors apart from plain values.

    {"optim": {"w": {"exp_avg": tensor, "step": 3}}}
        --flatten--> {"optim.w.exp_avg": tensor, "optim.w.step": 3} --split--> tensors | values
        <--put_back- values                                         tensors are filled in place

A plain value is what JSON holds, a tuple, bytes, or a number that JSON cannot spell.
Never: an object of another class, which only a pickle could bring back.
"""

from __future__ import annotations

import base64
import binascii
import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from olm_data.bounded_json import MAX_DEPTH, JsonObject
from olm_data.errors import UsageError, ValidationError, printable
from olm_data.storage.names import is_unicode
from olm_train.checkpoint.tensors import DTYPES, MAX_DIMENSIONS, MAX_NAME
from olm_train.model.shards import like

StateDict = Mapping[str, Any]
"""A state as torch's `state_dict` gives it: nested, or flat by names with dots; its leaves are
tensors, whole or DTensors, and plain values."""

FlatState = dict[str, Any]

_INT64 = range(-(1 << 63), 1 << 63)
_MAX_NESTING = (MAX_DEPTH - 4) // 2
"""Levels of a plain value: a tuple takes two in JSON, the file around it some more."""


def flatten(state: StateDict) -> FlatState:
    """Return the leaves of a nested state by their names joined with dots; a flat one as it is.

    Mappings are gone through, and so are lists that hold tensors; everything else is a leaf.

    Raises:
        UsageError: two leaves have the same name.
    """
    flat: FlatState = {}
    for name, leaf in _leaves(state, ""):
        if name in flat:
            raise UsageError(
                f"two values of the training state have the name {printable(name)}",
                where="state_dict() of the train module",
                why="a checkpoint could keep only one of them",
                fix="give one of them another name",
            )
        flat[name] = leaf
    return flat


def split(flat: StateDict) -> tuple[dict[str, Tensor], JsonObject]:
    """Return the tensors of a flat state, and its plain values in JSON.

    Raises:
        UsageError: a value is neither, or an index could not hold it.
    """
    for name, leaf in flat.items():
        _refuse_unindexed(name, leaf)
    tensors = {name: leaf for name, leaf in flat.items() if isinstance(leaf, Tensor)}
    return tensors, {n: to_json(leaf, n) for n, leaf in flat.items() if n not in tensors}


def put_back(state: Any, values: JsonObject, prefix: str = "") -> None:
    """Put plain values, given in JSON by name, where they belong in a nested state."""
    for key, child in list(_children(state)):
        name = f"{prefix}{key}"
        if _is_container(child):
            put_back(child, values, f"{name}.")
        elif not isinstance(child, Tensor):
            state[key] = from_json(values[name], name)


def to_json(value: Any, name: str, depth: int = 0) -> Any:
    """Return a plain value as JSON: what JSON cannot spell becomes `{"$kind": text}`.

    Args:
        name: of the value, for messages; those of what it holds are appended.
        depth: of containers around it.

    Raises:
        UsageError: it could not be brought back: no plain value, no text, or nested too deeply.
    """

    def part(key: Any, item: Any) -> Any:
        return to_json(item, f"{name}.{key}", depth + 1)

    found = f"a {type(value).__name__}"
    if isinstance(value, (tuple, list, dict)) and depth >= _MAX_NESTING:
        found = f"more than {_MAX_NESTING} levels deep"
    elif isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    elif isinstance(value, tuple):
        return {"$tuple": [part(number, item) for number, item in enumerate(value)]}
    elif isinstance(value, list):
        return [part(number, item) for number, item in enumerate(value)]
    elif isinstance(value, dict):
        if all(isinstance(k, str) and is_unicode(k) and not k.startswith("$") for k in value):
            return {key: part(key, item) for key, item in value.items()}
        found = "a mapping with a key that is no text, or begins with $"
    elif isinstance(value, str) and not is_unicode(value):
        found = "a text that is not valid UTF-8"
    elif value is None or isinstance(value, (bool, str)):
        return value
    elif isinstance(value, int):
        return int(value) if value in _INT64 else {"$int": hex(value)}
    elif isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    raise UsageError(
        f"a checkpoint cannot hold {printable(name)[:200]}: it is {found}",
        where="state_dict()",
        why="checkpoints hold tensors and plain values, nothing that would have to be unpickled",
        fix="return it as a number, text, bytes, or a list or mapping of these; tensors belong to "
        "the state of the train module",
    )


def from_json(value: Any, name: str) -> Any:
    """Return the plain value that `to_json` wrote.

    Raises:
        ValidationError: it wrote no such thing.
    """
    if isinstance(value, list):
        return [from_json(item, name) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: from_json(item, name) for key, item in value.items()}
    try:
        ((kind, text),) = value.items()
        if kind == "$tuple" and isinstance(text, list):
            return tuple(from_json(item, name) for item in text)
        if kind == "$bytes":
            return base64.b64decode(text, validate=True)
        if kind == "$int":
            return int(text, 16)
        if kind == "$float" and text in ("inf", "-inf", "nan"):
            return float(text)
    except (ValueError, TypeError, binascii.Error):
        pass
    raise ValidationError(f"the value {printable(name)} of the checkpoint is of no known kind")


class HostCopy:
    """A copy of a state on the CPU that later steps cannot change; the next copy overwrites it.

    A rank holds one more copy of its part of the state in main memory from the first save on,
    page-locked where the state is on a CUDA device, so that copying runs at the bus's speed.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def of(self, state: StateDict) -> FlatState:
        """Return `state`, flat, with every tensor and value copied; complete when this returns.

        Args:
            state: nested; tensors of any device, whole or DTensors, and plain values.

        Returns:
            The leaves by name; DTensors stay such, with their local part on the CPU.
        """
        flat = flatten(state)
        tensors = {name: leaf for name, leaf in flat.items() if isinstance(leaf, Tensor)}
        self._buffers = {name: buf for name, buf in self._buffers.items() if name in tensors}
        copied = {
            name: self._copied(name, leaf) if name in tensors else copy.deepcopy(leaf)
            for name, leaf in flat.items()
        }
        for device in {tensor.device for tensor in tensors.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return copied

    def _copied(self, key: str, tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            pinned = local.device.type == "cuda"
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
            self._buffers[key] = buffer
        buffer.copy_(local, non_blocking=True)
        if isinstance(tensor, DTensor):
            # Not `from_local`: on a CUDA mesh it would move the copy back to the device.
            return like(DTensor(buffer, tensor._spec, requires_grad=False), tensor)
        return buffer


def _refuse_unindexed(name: str, leaf: Any) -> None:
    """Refuse what could not be written, or would be written and then not read: see `Index.check`.

    Raises:
        UsageError: the name is no name; or the tensor has too many dimensions, no values, or values
            that do not lie one after the other.
    """
    if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        found = f"a name is 1 to {MAX_NAME:,} printable characters"
    elif isinstance(leaf, Tensor) and leaf.dim() > MAX_DIMENSIONS:
        found = f"it has {leaf.dim()} dimensions, at most {MAX_DIMENSIONS} are possible"
    elif isinstance(leaf, Tensor) and leaf.is_meta:
        found = "it is on the device 'meta', where tensors have no values"
    elif isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.is_nested):
        layout = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
        found = f"its layout is {layout}, not one value an element"
    elif isinstance(leaf, Tensor) and any(
        step == 0 and size > 1 for step, size in zip(leaf.stride(), leaf.shape, strict=True)
    ):
        found = "its elements share memory, as after expand(): none can be set apart from others"
    elif isinstance(leaf, Tensor) and leaf.dtype not in DTYPES.values():
        found = f"its dtype is {str(leaf.dtype).removeprefix('torch.')}"
    else:
        return
    raise UsageError(
        f"a checkpoint cannot hold {printable(name[:80])!r}",
        where="state_dict() of the train module",
        why=found,
        fix="return it under another name, or as a dense tensor of another shape or dtype",
    )


def _leaves(state: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, child in _children(state):
        if _is_container(child):
            yield from _leaves(child, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", child


def _children(container: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(container, Mapping):
        yield from container.items()
    else:
        yield from enumerate(container)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and _holds_tensor(value))


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)
