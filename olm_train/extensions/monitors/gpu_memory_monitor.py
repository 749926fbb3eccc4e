"""Memory of the GPU by step: what tensors take, what the allocator holds, how often it ran dry."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from olm_data.run_log.metric_names import (
    GPU_ACTIVE_GIB,
    GPU_ACTIVE_PERCENT,
    GPU_ALLOC_RETRIES,
    GPU_RESERVED_GIB,
    GPU_RESERVED_PERCENT,
)
from olm_train.callbacks.base import Callback
from olm_train.metrics import Reduce

GIB = 1 << 30


@dataclass(kw_only=True)
class GPUMemoryMonitorCallback(Callback):
    """Peaks of each step, the highest over the ranks; nothing on a machine without a GPU.

    Attributes:
        enabled: look at the memory, where `gpu_memory_monitor` is given at all.
        device_id: number of the GPU; default: that of the rank.
    """

    enabled: bool = True
    device_id: int | None = None

    def pre_train(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats(self._device())
        else:
            self.trainer.say("note: gpu_memory_monitor has nothing to look at: there is no GPU")

    def post_step(self) -> None:
        if not torch.cuda.is_available():
            return
        device = self._device()
        stats = torch.cuda.memory_stats(device)
        total = torch.cuda.get_device_properties(device).total_memory
        active, reserved = stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]
        values = {
            GPU_ACTIVE_GIB: active / GIB,
            GPU_ACTIVE_PERCENT: 100 * active / total,
            GPU_RESERVED_GIB: reserved / GIB,
            GPU_RESERVED_PERCENT: 100 * reserved / total,
            GPU_ALLOC_RETRIES: stats["num_alloc_retries"],
        }
        for name, value in values.items():
            self.trainer.record_metric(name, value, reduce=Reduce.max)
        torch.cuda.reset_peak_memory_stats(device)

    def _device(self) -> torch.device:
        own = self.trainer.world.device
        return own if self.device_id is None else torch.device("cuda", self.device_id)
