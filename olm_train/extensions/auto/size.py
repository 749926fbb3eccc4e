"""Bytes that a rank needs to train a model of any kind, for each way to share its weights. Pure.

its tensors -> bytes; what it keeps for the backward pass is not known (of decoders it is:
`estimate.sharding.need_of_decoder`)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from olm_train.estimate.sharding import Need
from olm_train.extensions.auto.strategy import DeviceConfig
from olm_train.parallel.config import DataParallelConfig

UNIT = 10**8
"""Parameters that are gathered as a whole, at most, if nothing is said."""
LEAST_UNITS = 32
"""A model is cut into about so many, at least."""
MOMENTS = 2
"""Tensors that an optimiser is counted to keep of each weight: those of AdamW."""
KNOWN = 0.5
"""Share of a device that is planned with where activations are not known."""


def need_of_any(
    model: nn.Module, units: Sequence[nn.Module], devices: DeviceConfig, *, micro_batches: int
) -> Need:
    """Return the need of any model but for activations, divided by `KNOWN`.

    Args:
        units: what is gathered as a whole, see `parallel.wrapping.units`.
    """
    weights = _bytes(model)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    inside = [_bytes(unit) for unit in units]
    largest = max(inside, default=0)

    def need(config: DataParallelConfig) -> int:
        alone = devices.world_size == 1
        shards = 1 if alone else config.degrees(devices.world_size, devices.nodes)[1]
        own = 0 if config.cpu_offload and not alone else (weights + MOMENTS * trained) / shards
        gradients = trained if micro_batches > 1 else trained / shards
        gathered = 0
        if shards > 1:
            rest = max(weights - sum(inside), 0)
            gathered = weights if config.reshard_after_forward is False else rest + 2 * largest
        return round((own + gradients + gathered) / KNOWN)

    return need


def unit_size(model: nn.Module) -> int:
    """Return the parameters from which on a module is gathered as a whole, if nothing is said."""
    return min(UNIT, max(1, sum(p.numel() for p in model.parameters()) // LEAST_UNITS))


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
