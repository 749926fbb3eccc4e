"""A plain GPT in a plain loop, by the two recipes that nanoGPT's README publishes.

    windows at random -> forward, cross entropy, backward -> clip -> cosine -> AdamW

On a CPU: characters, 4 layers, width 128, rows of 64, fp32. On a GPU: GPT-2 124M, bf16, compiled.
The recipe as facts; the code is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedruns.budget import WARM_UP, Budget, Point, Stopwatch, evaluated_steps
from speedruns.text import Source, Windows, bits_per_byte


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published recipe; dropout is 0 and there are no biases in either."""

    layers: int
    heads: int
    width: int
    length: int
    rows: int
    micro_batches: int
    rate: float
    lowest_rate: float
    warmup: int
    beta2: float
    characters: bool
    decay: float = 0.1
    clip: float = 1.0


CPU = Recipe(
    layers=4, heads=4, width=128, length=64, rows=12, micro_batches=1, rate=1e-3,
    lowest_rate=1e-4, warmup=100, beta2=0.99, characters=True,
)  # fmt: skip
GPU = Recipe(
    layers=12, heads=12, width=768, length=1024, rows=12, micro_batches=40, rate=6e-4,
    lowest_rate=6e-5, warmup=2000, beta2=0.95, characters=False,
)  # fmt: skip


class Block(nn.Module):
    """Attention and a feed-forward layer four times as wide, each behind a norm."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        width, self.heads = recipe.width, recipe.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, S, width] -> [b, S, width]."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [b, heads, S, width / heads]
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class PlainGPT(nn.Module):
    """Learned positions, blocks, a head that is the table of embeddings."""

    def __init__(self, recipe: Recipe, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, recipe.width)
        self.positions = nn.Embedding(recipe.length, recipe.width)
        self.blocks = nn.ModuleList(Block(recipe) for _ in range(recipe.layers))
        self.norm = nn.LayerNorm(recipe.width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                outputs = name.endswith(("out.weight", "down.weight"))
                scale = math.sqrt(2 * recipe.layers) if outputs else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [b, S] -> logits [b, S, vocabulary]."""
        x = self.table(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.table.weight)


class Text:
    """The documents of all sources as the ids of a recipe: characters, or the shards' tokens."""

    def __init__(self, recipe: Recipe, sources: Sequence[Source]) -> None:
        self.sources = sources
        if not recipe.characters:
            self.streams = [source.tokens for source in sources]
            self.held_out = [source.held_out_tokens for source in sources]
            self.vocabulary = 1 + max(int(ids.max()) for ids in self.streams)
            self.vocabulary = -(-self.vocabulary // 64) * 64
            return
        texts = [source.text for source in sources]
        every = [*texts, *(text for source in sources for text in source.held_out_texts)]
        points = np.unique(np.concatenate([np.unique(_code_points(text)) for text in every]))
        self.vocabulary = len(points)
        self.streams = [np.searchsorted(points, _code_points(text)) for text in texts]
        self.held_out = [
            [np.searchsorted(points, _code_points(text)) for text in source.held_out_texts]
            for source in sources
        ]


class Loop:
    """The model, its optimiser and a step."""

    def __init__(
        self, recipe: Recipe, text: Text, seed: int, device: torch.device, compiled: bool
    ) -> None:
        torch.manual_seed(seed)
        self.recipe, self.device = recipe, device
        self.model = PlainGPT(recipe, text.vocabulary).to(device)
        self._forward = torch.compile(self.model) if compiled else self.model
        parameters = list(self.model.parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim == 2], "weight_decay": recipe.decay},
                {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=recipe.rate,
            betas=(0.9, recipe.beta2),
            fused=device.type == "cuda",
        )
        shares = [source.share for source in text.sources]
        self._windows = Windows(text.streams, shares, recipe.length, seed)

    def step(self, rate: float) -> None:
        """Take one step."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for _ in range(self.recipe.micro_batches):
            ids, labels = (part.to(self.device) for part in self._windows.draw(self.recipe.rows))
            with self._autocast():
                logits = self._forward(ids)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            (loss / self.recipe.micro_batches).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def logits(self, ids: Tensor) -> Tensor:
        """Ids [b, S] -> logits, for an evaluation."""
        with self._autocast():
            result: Tensor = self.model(ids)
        return result

    def _autocast(self) -> torch.autocast:
        cuda = self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=cuda)


def rate_at(recipe: Recipe, step: int, steps: int) -> float:
    """Return the rate of a step, from 0: linear up, then half a cosine down to the lowest one."""
    warmup = min(recipe.warmup, steps // 10)
    if step < warmup:
        return recipe.rate * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    height = 0.5 * (1 + math.cos(math.pi * done))
    return recipe.lowest_rate + height * (recipe.rate - recipe.lowest_rate)


def train(
    recipe: Recipe,
    sources: Sequence[Source],
    budget: Budget,
    *,
    seed: int,
    points: int = 1,
    device: torch.device | None = None,
) -> list[Point]:
    """Train for the budget; return what was measured at its points."""
    device = device or torch.device("cpu")
    text = Text(recipe, sources)
    trial = Loop(recipe, text, seed, device, compiled=device.type == "cuda")
    for _ in range(WARM_UP):
        trial.step(0.0)  # compilers start up outside of the budget
    steps = budget.calibrate(lambda: trial.step(0.0))
    loop = Loop(recipe, text, seed, device, compiled=device.type == "cuda")
    watch, found = Stopwatch(budget), list[Point]()
    wanted = evaluated_steps(steps, points)
    watch.start()
    for number in range(steps):
        loop.step(rate_at(recipe, number, steps))
        if number + 1 not in wanted:
            continue
        watch.stop()
        loop.model.eval()
        bits = {
            source.name: bits_per_byte(
                loop.logits, documents, source.held_out_bytes, recipe.length, device
            )
            for source, documents in zip(sources, text.held_out, strict=True)
        }
        loop.model.train()
        seen = (number + 1) * recipe.rows * recipe.micro_batches * recipe.length
        found.append(Point(number + 1, seen, watch.wall, watch.used, bits))
        watch.start()
    return found


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
