"""Initial weights: each parameter is a function of (seed, its full name, its full shape) alone.

No parameter depends on the one drawn before it, on the device, on the number of processes or on
how the tensor is cut over them: the whole tensor is drawn on the CPU, then the part at home here
is kept. Adding a layer or an option leaves every other parameter as it was.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from olm_train.model.decoder import Decoder

RESIDUAL_OUTPUTS = ("attention.w_out.weight", "feed_forward.w_down.weight")
VOCABULARY_TABLES = ("embeddings.weight", "lm_head.weight")
CUTOFF = 3.0
"""Normal draws are truncated at this many standard deviations."""


def parameter_seed(seed: int, name: str) -> int:
    """The 63-bit generator seed of the parameter `name`."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def initial_value(seed: int, name: str, shape: torch.Size, *, std: float, n_layers: int) -> Tensor:
    """Draw the full tensor of one parameter, fp32 on the CPU.

    Biases are zeros, other vectors (norm weights) ones. Matrices are normal with deviation `std`,
    truncated at 3 deviations; those that write to the residual stream are scaled by
    1 / sqrt(2 n_layers), so that the stream's variance does not grow with depth (Radford et al.,
    2019).
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    if name.endswith(RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * n_layers)
    generator = torch.Generator(device="cpu").manual_seed(parameter_seed(seed, name))
    return truncated_normal(shape, std, generator)


def truncated_normal(shape: torch.Size, std: float, generator: torch.Generator) -> Tensor:
    """Draw normal values; those beyond CUTOFF deviations are drawn again.

    Not torch's `trunc_normal_`: its draws changed with torch 2.12, and a run begins alike under
    each version.
    """
    drawn = torch.empty(shape).normal_(std=std, generator=generator)
    while (outside := drawn.abs() > CUTOFF * std).any():
        drawn[outside] = torch.empty(int(outside.sum())).normal_(std=std, generator=generator)
    return drawn


@torch.no_grad()
def init_parameters(model: Decoder, seed: int) -> None:
    """Fill every parameter of `model`, whole or sharded (DTensor), without communication.

    The rows that pad the vocabulary are zeros; the others do not depend on how many there are.
    """
    config = model.config
    for name, parameter in model.named_parameters():
        shape, pads = parameter.shape, 0
        if name in VOCABULARY_TABLES:
            pads = config.padded_vocab_size - config.vocab_size
            shape = torch.Size((config.vocab_size, config.d_model))
        full = initial_value(seed, name, shape, std=config.init_std, n_layers=config.n_layers)
        assign(parameter, F.pad(full, (0, 0, 0, pads)) if pads else full)


@torch.no_grad()
def assign(target: Tensor, full: Tensor) -> None:
    """Copy a full tensor into `target`; of a sharded target each process keeps its own part."""
    if isinstance(target, DTensor):
        mesh = target.device_mesh
        part = distribute_tensor(
            full.to(mesh.device_type), mesh, target.placements, src_data_rank=None
        )
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(full)
