"""What does the loss ledger cost a training step?

    python benchmarks/bench_ledger.py --preset olm-1m --steps 240

One run with a ledger that is switched on and off every few steps; each block of steps ends by a
read of the metrics and, with the ledger, when its thread has found and stored the documents, so
that nothing of its work falls into the next block. Printed: the median over neighbouring pairs of
blocks of the time with over the time without, its quartiles, and the bytes of the ledger a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from support.small_datasets import mix_datasets, write_dataset  # noqa: E402

from olm_data.config.values import Values  # noqa: E402
from olm_train.distributed.world import World  # noqa: E402
from olm_train.extensions.ledger.loss_ledger import LossLedgerCallback  # noqa: E402
from olm_train.run.config import RunConfig  # noqa: E402

VOCABULARY = 4096


@dataclass(kw_only=True)
class Switched(LossLedgerCallback):
    """A ledger that is off in every second block of steps, and times the blocks."""

    block: int = 10
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    begun: float = 0.0

    def on(self, step: int) -> bool:
        return (step - 1) // self.block % 2 == 1

    def pre_step(self, batches: Sequence[Any]) -> None:
        if self.trainer.step % self.block == 0:
            self.begun = time.perf_counter()
        if self.on(self.trainer.step + 1):
            super().pre_step(batches)

    def post_step(self) -> None:
        if self.on(self.trainer.step):
            super().post_step()

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log_metrics(step, metrics)
        if step % self.block == 0:
            self._finish(0)
            self.seconds[self.on(step)].append(time.perf_counter() - self.begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="olm-1m")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=8, help="of a step and micro-batch")
    parser.add_argument("--document", type=int, default=120, help="mean tokens of a document")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--block", type=int, default=10, help="steps with, then without")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokens = args.rows * args.sequence_length
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = np.random.default_rng(0)
        count = 2 * args.steps * tokens // args.document // 4
        shards = [
            [rng.integers(0, VOCABULARY, 1 + int(n)) for n in rng.exponential(args.document, count)]
            for _ in range(4)
        ]
        for source, own in (("a", shards[:2]), ("b", shards[2:])):
            write_dataset(folder / source, own, vocab_size=VOCABULARY)
        lock = mix_datasets(
            folder,
            ["a", "b"],
            stages=[((args.steps + 1) * tokens, {"a": 1, "b": 1})],
            sequence_length=args.sequence_length,
        )
        values = Values(
            {
                "model": {"preset": args.preset},
                "data_loader": {"mixture": str(lock), "global_batch_size": tokens},
                "train_module": {
                    "rank_microbatch_size": tokens,
                    "optim": {"name": "adamw", "lr": 1e-3},
                },
                "trainer": {
                    "save_folder": str(folder / "run"),
                    "metrics_collect_interval": args.block,
                    "hard_stop": {"value": args.steps, "unit": "steps"},
                },
            }
        )
        trainer = RunConfig.resolve(values).build(World())
        ledger = Switched(block=args.block)
        trainer.add_callback("loss_ledger", ledger)
        trainer.fit()
        size = sum(file.stat().st_size for file in (folder / "run/ledger").iterdir())
    with_it, without = ledger.seconds[True][1:], ledger.seconds[False][1:]
    ratios = [a / b for a, b in zip(with_it, without, strict=False)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"{args.preset}, {args.rows} rows of {args.sequence_length}, documents of about "
        f"{args.document}: a step {1000 * statistics.median(without) / args.block:.1f} ms; with / "
        f"without {middle:.4f} (quartiles {low:.4f} to {high:.4f}, {len(ratios)} pairs), fastest "
        f"{min(with_it) / min(without):.4f}; {size / (args.steps / 2):,.0f} bytes a step"
    )


if __name__ == "__main__":
    main()
