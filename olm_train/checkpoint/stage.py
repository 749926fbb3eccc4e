"""A copy of a state that later steps cannot change, on the CPU, for a save beside the training.

    live tensors --copy, all queued--> pinned buffers (kept from save to save) --> one wait --> copy

Never: hand out a tensor that shares memory with a live one, on whatever device it lives.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from olm_train.checkpoint.state import flatten


class Stage:
    """Buffers for one copy of a state; the next copy overwrites them.

    A rank holds one more copy of its part of the state in main memory from the first save on,
    page-locked where the state is on a CUDA device, so that copying runs at the bus's speed.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `state`, flat, with every tensor and value copied; complete when this returns.

        Args:
            state: nested; tensors of any device, whole or DTensors, and plain values.

        Returns:
            The leaves by name; DTensors stay such, with their local part on the CPU.
        """
        flat = flatten(state)
        tensors = {name: leaf for name, leaf in flat.items() if isinstance(leaf, Tensor)}
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
            return DTensor(buffer, tensor._spec, requires_grad=False)
        return buffer
