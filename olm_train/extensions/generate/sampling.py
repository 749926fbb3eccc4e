"""Which token comes next: logits and the wishes of each text in, one id of each out.

    logits -> repetition penalty -> temperature -> top-k -> top-p -> min-p -> one draw -> id

A text's random numbers are a function of its seed and of how many tokens it has, of nothing else:
it is the same text in whatever batch, and after a restart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from olm_data.errors import UsageError

_MASK = (1 << 64) - 1
MAX_SEED = (1 << 63) - 1
_FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens of a text are chosen.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token, of equals the lowest id.
        top_k: only the k most likely tokens, and those as likely as the last of them; 0: all.
        top_p: of what is left, the fewest most likely tokens whose shares make this much; 1: all.
        min_p: only tokens with at least this share of the most likely one's probability; 0: all.
        repetition_penalty: logits of tokens that are in the prompt or the text already are divided
            by this where they are positive, else multiplied (Keskar et al., 2019); 1: left alone.
        seed: of the random numbers.

    Raises:
        UsageError: a number is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, fits, range_ in (
            ("temperature", 0 <= self.temperature < math.inf, "a number from 0 on"),
            ("top_k", self.top_k >= 0, "a number from 0 on"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            (
                "repetition_penalty",
                _FLOAT32.tiny <= self.repetition_penalty <= _FLOAT32.max,
                f"a number above 0, from {_FLOAT32.tiny:.2g} to {_FLOAT32.max:.2g}",
            ),
            ("seed", 0 <= self.seed <= MAX_SEED, f"from 0 to {MAX_SEED}"),
        ):
            if not fits:  # NaN fits nowhere
                raise UsageError(f"{name} is {range_}, not {getattr(self, name)}", where=name)

    def after(self, number: int) -> Sampling:
        """Return these with the seed so many further on; after the last one comes 0."""
        return replace(self, seed=(self.seed + number) % (MAX_SEED + 1))


def uniform(seed: int, number: int) -> float:
    """Return the random number of a text's token: in [0, 1), multiples of 2^-53.

    SplitMix64 (Steele et al., 2014) at its state after `number` + 1 steps.
    """
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


def choose(
    logits: Tensor,
    wishes: Sequence[Sampling],
    numbers: Sequence[int],
    seen: Sequence[Tensor | None],
) -> list[int]:
    """Return the next token of each text.

    Args:
        logits: fp32 [R, V], finite; may be changed.
        wishes: of each row.
        numbers: tokens that each text has got so far, its prompt not counted.
        seen: int64 ids of the prompt and the text, where there is a repetition penalty.
    """
    for row, ids in enumerate(seen):
        if ids is not None:
            old, penalty = logits[row, ids], wishes[row].repetition_penalty
            new = torch.where(old > 0, old / penalty, old * penalty)
            logits[row, ids] = new.clamp(_FLOAT32.min, _FLOAT32.max)
    chosen = logits.argmax(dim=-1)  # [R]
    drawn = [row for row, wish in enumerate(wishes) if wish.temperature > 0]
    if drawn:
        all_drawn = len(drawn) == len(wishes)
        chosen[drawn] = _draw(
            logits if all_drawn else logits[drawn],
            [wishes[row] for row in drawn],
            [uniform(wishes[row].seed, numbers[row]) for row in drawn],
        )
    return chosen.tolist()


def _draw(logits: Tensor, wishes: Sequence[Sampling], at: Sequence[float]) -> Tensor:
    """Return the ids at which the cumulative probabilities of each row pass `at`, int64 [R]."""
    shares = probabilities(logits, wishes)
    sums = shares.cumsum(dim=-1)
    total = sums[:, -1:]
    point = torch.tensor(at, dtype=torch.float64, device=logits.device)[:, None] * total
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(sums, torch.minimum(point, below), right=True)[:, 0]


def probabilities(logits: Tensor, wishes: Sequence[Sampling]) -> Tensor:
    """Return what tokens are drawn with, float64 [R, V], of logits [R, V] and temperatures above 0.

    The sum of a row may differ from 1: what was left out is not shared out again.
    """

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    size = logits.shape[-1]
    # From the largest one on: a temperature of 1e-300 makes no infinity of it.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double()
    scaled = scaled / column([wish.temperature for wish in wishes])
    kept = [wish.top_k if 0 < wish.top_k < size else size for wish in wishes]
    if min(kept) < size:
        most = max(k for k in kept if k < size)
        values = scaled.topk(most, dim=-1).values  # [R, most]
        last = torch.tensor([min(k, most) - 1 for k in kept], device=logits.device)[:, None]
        limit = values.gather(1, last)
        limit[[k == size for k in kept]] = -torch.inf
        scaled = scaled.masked_fill(scaled < limit, -torch.inf)
    shares = scaled.softmax(dim=-1)
    some = [row for row, wish in enumerate(wishes) if wish.top_p < 1]
    if some:
        sorted_, order = shares[some].sort(dim=-1, descending=True, stable=True)
        before = sorted_.cumsum(dim=-1) - sorted_
        sorted_[before >= column([wishes[row].top_p for row in some])] = 0.0
        shares[some] = torch.zeros_like(sorted_).scatter(1, order, sorted_)
    if any(wish.min_p for wish in wishes):
        least = shares.amax(dim=-1, keepdim=True) * column([wish.min_p for wish in wishes])
        shares = shares.masked_fill(shares < least, 0.0)
    return shares
