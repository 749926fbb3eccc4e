"""Models, data and runs of `AutoTrainer`; as a program, what each rank of a run does.

usage: auto_runs.py FOLDER STRATEGY|auto KIND STOP [STOP ...]    one `train` a stop, of 6 steps
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from support.runs import group_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from olm_train import (
    AutoTrainer,
    CheckpointerConfig,
    Decoder,
    DecoderConfig,
    World,
    init_parameters,
)

SHAPE = DecoderConfig(vocab_size=64, d_model=16, n_layers=2, n_heads=2)
LENGTH, ROWS, STEPS = 16, 48, 6


def decoder(seed: int = 1, shape: DecoderConfig = SHAPE) -> Decoder:
    model = Decoder(shape)
    init_parameters(model, seed)
    return model


class TiedModel(nn.Module):
    """A language model that is no decoder: its head is its embedding table; with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(64, 16)
        self.middle = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embeddings.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embeddings(ids)
        return self.head(h + self.drop(self.middle(h)))  # type: ignore[no-any-return]


def tied(seed: int = 1, *, dropout: bool = True) -> TiedModel:
    torch.manual_seed(seed)
    model = TiedModel()
    nn.init.normal_(model.embeddings.weight, std=0.1)
    if not dropout:
        model.drop.p = 0.0
    return model


MODELS = {"decoder": decoder, "tied": tied, "plain": lambda: tied(dropout=False)}


def rows(count: int = ROWS, *, shift: int = 1) -> TensorDataset:
    """Rows that are easily learned: each id tells the next."""
    first = torch.arange(count)[:, None]
    ids = (first + shift * torch.arange(LENGTH + 1)) % 64
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def loader(batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows(), batch_size=batch_size, **options)


def trainer(folder: Path | str, kind: str = "decoder", **options: Any) -> AutoTrainer:
    return AutoTrainer(
        MODELS[kind](),
        options.pop("optimizer", torch.optim.AdamW),
        options.pop("dataloader", None) or loader(),
        **{
            "context_length": LENGTH,
            "learning_rate": 1e-2,
            "save_folder": folder,
            "total_steps": STEPS,
            **options,
        },
    )


def train(
    folder: Path | str, strategy: str, kind: str, *stops: int, world: World | None = None
) -> tuple[str, list[float]]:
    """Train up to each stop in turn on this rank; return the strategy taken and the losses."""
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if world is None else world.size
    run = trainer(
        folder,
        kind,
        world=world,
        dataloader=loader(8 // ranks),
        force_strategy=None if strategy == "auto" else strategy,
        grad_clip_norm=1.0,
        checkpointer=CheckpointerConfig(save_interval=2),
        wrap_classes=() if kind == "decoder" else (nn.Linear,),
    )
    for stop in stops:
        losses = run.train(max_steps=stop)
        assert len(losses) == run.global_step == stop, losses
    run.close()
    return run.strategy, losses


def train_in_group(folder: Path, strategy: str, kind: str, *stops: int) -> tuple[str, list[float]]:
    """`train` as one of the ranks of `support.distributed.run_ranks`."""
    return train(folder, strategy, kind, *stops, world=group_world())


def main() -> None:
    folder, strategy, kind, *stops = sys.argv[1:]
    taken, losses = train(folder, strategy, kind, *map(int, stops))
    # in one piece: ranks share the output
    sys.stdout.write(" ".join(["LOSSES", taken, *map(repr, losses)]) + "\n")


if __name__ == "__main__":
    main()
