"""The best learning rate of a small model is that of a wide one: with sp it is not."""

from __future__ import annotations

from collections.abc import Sequence
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
BASE, LAYERS, LENGTH, ROWS, STEPS = 32, 2, 64, 8, 60


@cache
def text() -> Tensor:
    """Bytes of our pages, fewer than 128 of them: [n]."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return torch.tensor([b & 127 for page in pages for b in page.read_bytes()])


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text()) - LENGTH, (ROWS, 1), generator=generator)
    return text()[starts + torch.arange(LENGTH + 1)]


def final_loss(width: int, name: Any, rate: float, seed: int = 0) -> float:
    """Mean loss of the last tenth of the steps; it is warmed up for a tenth, and then falls to 0."""
    base = None if name == "sp" else BaseConfig(d_model=BASE, n_layers=LAYERS)
    config = DecoderConfig(
        vocab_size=128, d_model=width, n_layers=LAYERS, n_heads=width // 16, base=base,
        parametrization=name, feed_forward={"hidden_size": 3 * width},
    )  # fmt: skip
    model, losses = Decoder(config), list[float]()
    init_parameters(model, seed)
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


def moved(name: Any, widths: Sequence[int], rates: Sequence[float], seeds: int) -> float:
    """By how many factors of 2 the best rate of the widest differs from that of the narrowest."""
    best = []
    for width in widths:
        found = [sum(final_loss(width, name, r, s) for s in range(seeds)) / seeds for r in rates]
        print(f"{name} {width}: " + ", ".join(f"{r:g}: {x:.3f}" for r, x in zip(rates, found)))
        best.append(rates[min(range(len(rates)), key=found.__getitem__)])
    return float(torch.tensor(best[-1] / best[0]).log2())
