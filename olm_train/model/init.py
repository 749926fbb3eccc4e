"""Initial values: each element is a function of (seed, parameter name, place in it) alone.

No element depends on the one drawn before it, on the device, on the number of processes and
threads, or on how the tensor is cut over them: each process draws the part that is at home there,
on the CPU, and no more. Adding a layer, an option or ids leaves every other element as it was.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from olm_train.model.config import VOCABULARY_TABLES
from olm_train.model.decoder import Decoder
from olm_train.model.normal import Workspace
from olm_train.model.shards import local_block

RULE: Final = "sliced-1"
"""Name of the rule by which seed and names give the values; other values are another name."""

RESIDUAL_OUTPUTS = ("attention.w_out.weight", "feed_forward.w_down.weight")

PIECE = 1 << 20
"""Elements a thread takes at a time."""


def parameter_key(seed: int, name: str) -> int:
    """Return the 64 bits that name the stream of the parameter `name`."""
    digest = hashlib.sha256(f"{RULE}\0{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


@torch.no_grad()
def init_parameters(model: Decoder, seed: int, *, threads: int | None = None) -> None:
    """Fill every parameter of `model`, whole or sharded (DTensor), without communication.

    Biases and the rows that pad the vocabulary are zeros, other vectors (norm weights) ones, or
    zeros where they are added to 1.
    Matrices are normal with deviation `init_std`, truncated at 3 deviations; those that write to
    the residual stream are scaled by 1 / sqrt(2 n_layers), so that the stream's variance does not
    grow with depth (Radford et al., 2019).

    Args:
        threads: that draw at a time, no matter for the values; default: as many as torch uses.
    """
    config, pieces = model.config, deque[_Piece]()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith(".bias") else config.norm.initial_weight)
            continue
        residual = name.endswith(RESIDUAL_OUTPUTS)
        std = config.init_std / (math.sqrt(2 * config.n_layers) if residual else 1)
        rows = config.vocab_size if name in VOCABULARY_TABLES else parameter.shape[0]
        pieces.extend(_pieces(parameter, rows, parameter_key(seed, name), std))
    workers = max(1, min(threads or torch.get_num_threads(), len(pieces)))
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(_draw, pieces) for _ in range(workers)]:
            done.result()


@dataclass(frozen=True)
class _Piece:
    """Elements that lie side by side: value `start` of the stream `key`, and those after it."""

    target: Tensor
    key: int
    start: int
    std: float


def _pieces(matrix: Tensor, rows: int, key: int, std: float) -> Iterator[_Piece]:
    """Cut this rank's part of the first `rows` rows into pieces; put zeros into those below."""
    part, (down, across) = local_block(matrix)
    drawn = max(0, min(rows, down.stop) - down.start)
    part[drawn:].zero_()
    width = matrix.shape[1]
    if across.stop - across.start == width:
        lines = [(part[:drawn].view(-1), down.start * width)]
    else:
        lines = [(part[i], (down.start + i) * width + across.start) for i in range(drawn)]
    for line, start in lines:
        for first in range(0, line.numel(), PIECE):
            yield _Piece(line[first : first + PIECE], key, start + first, std)


def _draw(pieces: deque[_Piece]) -> None:
    """Draw pieces until none is left; other threads take from the same ones."""
    workspace, buffer = Workspace(), np.empty(0, dtype=np.float32)
    while True:
        try:
            piece = pieces.popleft()
        except IndexError:
            return
        target = piece.target
        if target.device.type == "cpu" and target.dtype is torch.float32:
            workspace.fill(target.numpy(), piece.key, piece.start, piece.std)
            continue
        if not buffer.size:
            buffer = np.empty(PIECE, dtype=np.float32)
        values = buffer[: target.numel()]
        workspace.fill(values, piece.key, piece.start, piece.std)
        target.copy_(torch.from_numpy(values))
