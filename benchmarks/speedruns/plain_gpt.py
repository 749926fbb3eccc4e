"""A plain GPT in a plain loop: by the two recipes that nanoGPT's README publishes, or with Muon.

    windows at random -> forward, cross entropy, backward -> clip -> cosine | line -> AdamW | Muon

On a CPU: characters, 4 layers, width 128, rows of 64, fp32. On a GPU: GPT-2 124M, bf16, compiled.
The recipe as facts; the code is ours. `MUON` is the same network with the quickstart's tokens,
width, depth, batch, optimiser and schedule: what is left is our architecture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olm_train.optim.muon import Muon
from speedruns.budget import WARM_UP, Budget, Point, Stopwatch, Tuning, evaluated_steps
from speedruns.text import Source, Windows, measure


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe; dropout is 0 and there are no biases in any.

    Attributes:
        lowest: rate at the end, of the peak.
        muon: for the blocks' matrices, and a line down to the lowest rate; the table's rate is
            `table` times the peak.
    """

    layers: int
    heads: int
    width: int
    length: int
    rows: int
    micro_batches: int
    published: Tuning
    lowest: float = 0.1
    beta2: float
    characters: bool
    decay: float = 0.1
    clip: float = 1.0
    muon: bool = False
    bf16: bool = False
    table: float = 1.0


CPU = Recipe(
    layers=4, heads=4, width=128, length=64, rows=12, micro_batches=1,
    published=Tuning(rate=1e-3, warmup=0.05), beta2=0.99, characters=True,
)  # fmt: skip
GPU = Recipe(
    layers=12, heads=12, width=768, length=1024, rows=12, micro_batches=40,
    published=Tuning(rate=6e-4, warmup=0.1), beta2=0.95, characters=False, bf16=True,
)  # fmt: skip
MUON = Recipe(
    layers=2, heads=2, width=256, length=256, rows=16, micro_batches=1,
    published=Tuning(rate=1.2e-2, warmup=0.02), lowest=0.0, beta2=0.95, characters=False,
    muon=True, bf16=True, table=3.33,
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
        # each after a line's end, as tokens are after a document's
        held_out = [["\n" + text for text in source.held_out_texts] for source in sources]
        every = [*texts, *(text for source in held_out for text in source)]
        points = np.unique(np.concatenate([np.unique(_code_points(text)) for text in every]))
        self.vocabulary = len(points)
        self.streams = [np.searchsorted(points, _code_points(text)) for text in texts]
        self.held_out = [
            [np.searchsorted(points, _code_points(text)) for text in source] for source in held_out
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
        self._optimizer = self._build_optimizer()
        shares = [source.share for source in text.sources]
        self._windows = Windows(text.streams, shares, recipe.length, seed)

    def step(self, rate: float) -> None:
        """Take one step."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["ratio"]
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
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.bf16)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        tables = [self.model.table.weight, self.model.positions.weight]
        inner = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        adam = {"lr": 0.0, "betas": (0.9, recipe.beta2), "eps": 1e-8}
        if not recipe.muon:
            groups = [
                {"params": [*tables, *inner], "weight_decay": recipe.decay, "ratio": 1.0},
                {"params": vectors, "weight_decay": 0.0, "ratio": 1.0},
            ]
            return torch.optim.AdamW(groups, fused=self.device.type == "cuda", **adam)
        parts = [[recipe.width] * 3 if len(p) == 3 * recipe.width else [len(p)] for p in inner]
        options = {"momentum": 0.95, "nesterov": True, "adjust_lr": "rms_norm", "parts": parts}
        muon = Muon([
            {"params": inner, "weight_decay": recipe.decay, "ratio": 1.0, "lr": 0.0, **options},
            {"params": tables, "weight_decay": 0.0, "ratio": recipe.table, **adam},
            {"params": vectors, "weight_decay": 0.0, "ratio": 1.0, **adam},
        ])  # fmt: skip
        muon.reduced = True
        return muon


def rate_at(recipe: Recipe, tuning: Tuning, step: int, steps: int) -> float:
    """Return the rate of a step, from 0: linear up, then half a cosine, or a line, down."""
    warmup = round(tuning.warmup * steps)
    if step < warmup:
        return tuning.rate * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    height = 1 - done if recipe.muon else 0.5 * (1 + math.cos(math.pi * done))
    return tuning.rate * (recipe.lowest + height * (1 - recipe.lowest))


def train(
    recipe: Recipe,
    sources: Sequence[Source],
    budget: Budget,
    tuning: Tuning | None = None,
    *,
    seed: int,
    points: int = 1,
    device: torch.device | None = None,
) -> list[Point]:
    """Train for the budget; return what was measured at its points."""
    device, tuning = device or torch.device("cpu"), tuning or recipe.published
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
        loop.step(rate_at(recipe, tuning, number, steps))
        if number + 1 not in wanted:
            continue
        watch.stop()
        loop.model.eval()
        bits = {
            source.name: measure(loop.logits, documents, source.sizes, recipe.length, device)
            for source, documents in zip(sources, text.held_out, strict=True)
        }
        loop.model.train()
        seen = (number + 1) * recipe.rows * recipe.micro_batches * recipe.length
        found.append(Point(number + 1, seen, watch.wall, watch.used, bits))
        watch.start()
    return found


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
