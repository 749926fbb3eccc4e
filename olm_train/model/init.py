"""Initial values: each element is a function of (seed, parameter name, place in it) alone.

No element depends on the one drawn before it, on the device, on the number of processes and
threads, or on how the tensor is cut over them: each process draws the part that is at home there,
on the CPU, and no more. Adding a layer, an option or ids leaves every other element as it was.

The truncated normal values: value i of a stream is a function of (key, i) alone.

    (key, i // 2) --SplitMix64--> two 32-bit integers --inverse distribution--> values 2i, 2i + 1

So any slice of a stream is drawn without the rest, by any number of threads. Every operation is one
on integers or one that IEEE 754 rounds correctly (+, -, *, /, square root), each for itself, and no
library's logarithm has a part in it: the same bits on every processor and under every version of
NumPy. Measured: benchmarks/LOG.md.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from olm_train.model.config import VOCABULARY_TABLES, DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.mixture import Router
from olm_train.model.shards import local_blocks

CUTOFF = 3.0
"""Values are truncated at this many standard deviations."""

CHUNK = 1 << 17
"""Values at a time: few enough for a processor's cache, enough for its threads to run apart."""

# SplitMix64 (Steele, Lea and Flood, 2014): step of the counter, then the finaliser.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))

# With q uniform in (-1, 1) and s = sqrt(1 / erf(3 / sqrt 2)^2 - q^2), the inverse of the truncated
# distribution is q * P(s) / Q(s) within 6e-6 of its value, P and Q monic cubics with these lower
# coefficients and FACTOR in front: a minimax fit, made so much smaller that no value lies beyond
# the cutoff. All signs are plus: nothing cancels, fp32 is enough.
_END = 1.0054215378035345
_P = (28.471023489595805, 11.84735136059998, 0.46808006603043256)
_Q = (1.3931635516340903, 0.3251483884894208, 0.008820695198898228)
_FACTOR = 0.08169024374257718


class Workspace:
    """Buffers for one thread that draws; made once, since making them costs as much as drawing."""

    def __init__(self) -> None:
        self._steps = np.arange(CHUNK // 2, dtype=np.uint64) * _STEP
        self._bits = np.empty(CHUNK // 2, dtype=np.uint64)
        self._shifted = np.empty(CHUNK // 2, dtype=np.uint64)
        self._floats = [np.empty(CHUNK, dtype=np.float32) for _ in range(4)]

    def fill(self, out: NDArray[np.float32], key: int, start: int, std: float) -> None:
        """Write values `start`, `start` + 1, ... of the stream `key` into `out`.

        Args:
            out: 1-D, contiguous.
            key: 64 bits that name the stream.
            start: number of its first value here.
            std: standard deviation of the normal distribution before it is truncated.
        """
        done = 0
        while done < out.size:
            first = start + done
            skip = first % 2  # values come in pairs
            count = min(CHUNK - skip, out.size - done)
            pairs = (skip + count + 1) // 2
            integers = self._integers(key, first // 2, pairs)[skip : skip + count]
            self._normal(integers, std, out[done : done + count])
            done += count

    def _integers(self, key: int, pair: int, pairs: int) -> NDArray[np.int32]:
        """Return the 2 * `pairs` uniform 32-bit integers from pair number `pair` on."""
        origin = np.uint64((key + (pair + 1) * int(_STEP)) % 2**64)
        bits, shifted = self._bits[:pairs], self._shifted[:pairs]
        np.add(self._steps[:pairs], origin, out=bits)
        for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
            np.right_shift(bits, shift, out=shifted)
            np.bitwise_xor(bits, shifted, out=bits)
            if multiplier is not None:
                np.multiply(bits, multiplier, out=bits)
        return bits.astype("<u8", copy=False).view("<i4")

    def _normal(self, integers: NDArray[np.int32], std: float, out: NDArray[np.float32]) -> None:
        """Turn uniform integers into truncated normal values.

        s is computed times 2^31, as the integers are q times 2^31: powers of two change no bit.
        """
        q, s, p, denominator = (buffer[: out.size] for buffer in self._floats)
        np.copyto(q, integers, casting="unsafe")
        np.multiply(q, q, out=s)
        np.subtract(np.float32(_END * 2.0**62), s, out=s)
        np.sqrt(s, out=s)
        for target, coefficients in ((p, _P), (denominator, _Q)):
            np.add(s, np.float32(coefficients[0] * 2.0**31), out=target)
            for power, coefficient in enumerate(coefficients[1:], 2):
                np.multiply(target, s, out=target)
                np.add(target, np.float32(coefficient * 2.0 ** (31 * power)), out=target)
        np.divide(p, denominator, out=p)
        np.multiply(p, q, out=p)
        np.multiply(p, np.float32(std * _FACTOR * 2.0**-31), out=out)


RULE: Final = "sliced-1"
"""Name of the rule by which seed and names give the values; other values are another name."""

RESIDUAL_OUTPUTS = (
    "attention.w_out.weight",
    "feed_forward.w_down.weight",
    "feed_forward.experts.w_down",
    "feed_forward.shared.w_down.weight",
)

PIECE = 1 << 20
"""Elements a thread takes at a time."""


def parameter_key(seed: int, name: str) -> int:
    """Return the 64 bits that name the stream of the parameter `name`."""
    digest = hashlib.sha256(f"{RULE}\0{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def initial_std(config: DecoderConfig, name: str) -> float:
    """Return the standard deviation of the initial values of a matrix, before they are cut off."""
    residual = name.endswith(RESIDUAL_OUTPUTS)
    std = config.init_std / (math.sqrt(2 * config.n_layers) if residual else 1)
    return std * config.scaling.init(name)


@torch.no_grad()
def init_parameters(model: Decoder, seed: int, *, threads: int | None = None) -> None:
    """Fill every parameter of `model`, whole or sharded (DTensor), without communication.

    Biases, those of routers too, and the rows that pad the vocabulary are zeros, other vectors
    (norm weights) ones, or zeros where they are added to 1.
    Matrices are normal with deviation `init_std`, truncated at 3 deviations; those that write to
    the residual stream are scaled by 1 / sqrt(2 n_layers), so that the stream's variance does not
    grow with depth (Radford et al., 2019). A parametrization multiplies the deviation.

    Args:
        threads: that draw at a time, no matter for the values; default: as many as torch uses.
    """
    config, pieces = model.config, deque[_Piece]()
    for module in model.modules():
        if isinstance(module, Router) and module.bias is not None:
            module.bias.zero_()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith(".bias") else config.norm.initial_weight)
            continue
        rows = config.vocab_size if name in VOCABULARY_TABLES else parameter.shape[0]
        pieces.extend(
            _pieces(parameter, rows, parameter_key(seed, name), initial_std(config, name))
        )
    _draw_all(pieces, threads)


@torch.no_grad()
def draw_normal(tensors: Mapping[str, Tensor], seed: int) -> None:
    """Fill matrices, whole or sharded, by their names: as `init_parameters`, of deviation 1."""
    pieces = deque[_Piece]()
    for name, tensor in tensors.items():
        pieces.extend(_pieces(tensor, tensor.shape[0], parameter_key(seed, name), 1.0))
    _draw_all(pieces)


def _draw_all(pieces: deque[_Piece], threads: int | None = None) -> None:
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
    width = matrix.shape[1:].numel()
    for part, (down, across, *_) in local_blocks(matrix):
        drawn = max(0, min(rows, down.stop) - down.start)
        part[drawn:].zero_()
        if part.shape[1:] == matrix.shape[1:]:
            lines = [(part[:drawn].view(-1), down.start * width)]
        else:
            start = across.start * matrix.shape[2:].numel()  # only the second one is cut, too
            lines = [(part[i].view(-1), (down.start + i) * width + start) for i in range(drawn)]
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
