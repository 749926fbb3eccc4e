"""The best learning rate of a small model is that of a wide one: with sp it is not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.model.parametrization import BaseConfig
from olm_train.optim.adamw import AdamWConfig

ROOT = Path(__file__).parents[2]
BASE = BaseConfig(d_model=32, n_layers=2, head_dim=16)
LENGTH, ROWS, STEPS = 32, 8, 40
RATES = [2.0**-power for power in range(10, 3, -1)]


@cache
def text() -> Tensor:
    """Bytes of a text that nobody edits: [n]."""
    return torch.tensor([byte & 127 for byte in (ROOT / "LICENSE").read_bytes()])


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text()) - LENGTH, (ROWS, 1), generator=generator)
    return text()[starts + torch.arange(LENGTH + 1)]


@cache
def final_loss(name: Any, rate: float, width: int = 32, layers: int = 2) -> float:
    """Mean loss of the last tenth of the steps; the rate rises for a tenth, and then falls to 0."""
    config = DecoderConfig(
        vocab_size=128, d_model=width, n_layers=layers, n_heads=width // 16, init_std=0.1,
        feed_forward={"hidden_size": 3 * width}, parametrization=name,
        base=None if name == "sp" else BASE,
    )  # fmt: skip
    model, losses = Decoder(config), list[float]()
    init_parameters(model, 0)
    optimizer = AdamWConfig(lr=rate).build(model)
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * min(10 * step / STEPS, 1 - (step - 1) / STEPS)
        ids = batch(step)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-STEPS // 10 :]) / (STEPS // 10)


def best(name: Any, **size: int) -> int:
    """Number of the best of the rates."""
    found = [final_loss(name, rate, **size) for rate in RATES]
    print(name, size, " ".join(f"{loss:.3f}" for loss in found))
    return min(range(len(RATES)), key=found.__getitem__)


def test_the_better_rate_of_the_base_is_better_at_four_times_its_width() -> None:
    """And with sp, which is the same at base size, the worse one."""
    low, high = 2.0**-8, 2.0**-6
    assert final_loss("mup", high) < final_loss("mup", low) - 0.05
    assert final_loss("mup", high, 128) < final_loss("mup", low, 128) - 0.05
    assert final_loss("sp", low, 128) < final_loss("sp", high, 128) - 0.05


@pytest.mark.slow
def test_the_best_rate_moves_by_a_step_at_most_over_four_times_the_depth() -> None:
    at_base = best("completep")
    for size in ({"layers": 8}, {"layers": 4, "width": 64}):
        assert abs(best("completep", **size) - at_base) <= 1
