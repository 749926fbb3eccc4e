"""The host never waits for the device inside a step; it reads metrics every few steps.

On a CPU nothing waits, but the same operators are called that would: reading a scalar, copying to
the host, making shapes of values.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.expert_ranks import BALANCES, of_experts
from support.training import build, micro_batches
from torch.utils._python_dispatch import TorchDispatchMode

from olm_train.model.loss_config import LossConfig
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig

WAITING = {
    "_local_scalar_dense": "item(), float(), bool()",
    "nonzero": "shape of values",
    "masked_select": "shape of values",
    "_unique2": "shape of values",
    "is_nonzero": "bool()",
    "equal": "torch.equal()",
}


class Syncs(TorchDispatchMode):
    """Counts operators that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name, options = func._opname, kwargs or {}
        # A mask as an index is a nonzero in disguise.
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if name in WAITING or masks:
            self.calls[name] += 1
        return func(*args, **options)


def count(steps: int, **options: Any) -> Counter[str]:
    """Waits of `steps` steps after the first, which makes the optimiser's state."""
    module = build(**options)
    module.train_step(micro_batches(1, [3, 5], module.world), 1, 6)
    batches = [micro_batches(step, [3, 5], module.world) for step in range(2, 2 + steps)]
    with Syncs() as syncs:
        for step, parts in enumerate(batches, start=2):
            module.train_step(parts, step, 6)
    return syncs.calls


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": LossConfig(name="chunked", chunk_size=50, z_loss_multiplier=1e-3)},
        {"ac_config": ActivationCheckpointingConfig(mode="selected_ops")},
        {"param_dtype": "bfloat16"},
        *({"model": of_experts(**balance)} for balance in BALANCES.values()),
    ],
    ids=["default", "chunked", "selected_ops", "bfloat16", *BALANCES],
)
def test_a_step_never_makes_the_host_wait(options: Any) -> None:
    assert count(2, **options) == Counter()


def test_the_count_sees_a_look() -> None:
    with Syncs() as syncs:
        x = torch.ones(3)
        float(x.sum())
        x[x > 0]
        bool(x.sum() > 2)
    assert sum(syncs.calls.values()) == 3
