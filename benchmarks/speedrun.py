"""Bits per byte for the time it takes: ours, nanoGPT's recipe, transformers' Trainer, a plain GPT.

    python benchmarks/speedrun.py --seconds 75 --seeds 2
    python benchmarks/speedrun.py --seconds 15 --tune 8 --processors
    python benchmarks/speedrun.py --seconds 600 --seeds 1

Each contestant learns from the same files, the quickstart's, 80 % code and 20 % documentation,
for the same time on the same cores, and is measured on the same held-out documents: a tenth of
the files, by the digest of their text, without near copies of others. One half of them is to choose
by, `select`, the other for what is claimed, `report`. Beside bits per byte stands the standard
error over documents. Time is that of training alone: tokens are there, evaluations, imports and
saves do not count, compilers do where a contestant compiles on a CPU. The number of steps, which a
schedule has to know, comes from a throwaway run of twelve; what the run then took stands beside it.
Held-out documents are cut into rows as long as those trained on, which do not overlap.

* ours: `pipelines/quickstart/train.yaml` by its own command, a rank a core; for --seconds above
  300 with the larger model of `LONG`.
* nanoGPT: the recipe for a CPU of its README: characters, 4 layers, width 128, rows of 64, 12 a
  batch, a cosine down to a tenth, fp32; steps as the time allows.
* transformers: `Trainer` by the options of the library's course, our tokenizer and shape, bf16.
* plain-muon: a plain GPT in a plain loop with our optimiser, tokens, batch, width and depth.

Rates and warm-ups are those of `TUNED`, found by --tune N: the same search of N runs for each of
them, ours too, on `select`. --published takes those of the recipes, and of train.yaml, instead.

--processors counts seconds of processors in place of the clock's, as many as --seconds times the
cores: for a machine that others use. A run on quiet cores has a little less than one a core.

For a GPU, 124M on shards of your own, loss against time:

    olm-data tokenize --source fineweb-edu --tokenizer gpt2 --holdout 0.001 --output tokens/fineweb
    python benchmarks/speedrun.py --gpu --tokens tokens/fineweb --seconds 1800 --points 10
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from speedruns import hf_trainer, ours, plain_gpt
from speedruns.budget import Budget, Point, Tuning
from speedruns.hf_trainer import NotThere
from speedruns.text import HALVES, Measured, Source, quickstart_sources
from speedruns.tune import tune

TUNED = {
    "ours": Tuning(7e-3, 0.04),
    "nanoGPT": Tuning(1e-3, 0.2),
    "transformers": Tuning(4.5e-3, 0.05),
    "plain-muon": Tuning(4e-3, 0.02),
}
"""What --tune 8 chose in 20 s of one core (LOG.md)."""
NAMES = ("ours", "nanoGPT", "transformers", "plain-muon")
LONG = [
    "--model.d_model=384",
    "--model.n_layers=3",
    "--model.n_heads=3",
    "--train_module.optim.lr=1e-2",
]
"""What a run of minutes has other than the quickstart."""
LONG_SECONDS = 300
GPU_LENGTH = 1024
GPU_CONFIG = """\
model:
  {preset: olm-125m, head: {tied: true}, vocab_multiple: 128, attention: {qk_norm: head}}
data_loader: {mixture: mixture.lock.json, global_batch_size: 491520}
train_module:
  rank_microbatch_size: 16384
  optim: {name: muon, lr: 2.0e-3}
  scheduler: {name: wsd, warmup_fraction: 0.02, decay_fraction: 0.5}
  dp_config: {param_dtype: bfloat16}
trainer: {save_folder: run}
"""


@dataclass(frozen=True)
class Contestant:
    """What takes a budget, a tuning and a seed, and trains; and the tuning of its recipe."""

    published: Tuning
    run: Callable[[Budget, Tuning, int], list[Point]]


def contestants(
    args: argparse.Namespace, sources: Sequence[Source], folder: Path
) -> dict[str, Contestant]:
    """Return those that were asked for, by name."""
    device, recipe = torch.device("cpu"), plain_gpt.CPU
    if args.gpu:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        (folder / "train.yaml").write_text(GPU_CONFIG)
        us = ours.Ours(folder / "train.yaml", sources, GPU_LENGTH, ranks=1, overrides=args.override)
        recipe = plain_gpt.GPU
    else:
        longer = LONG if args.seconds > LONG_SECONDS else []
        us = ours.quickstart(sources, ranks=args.cores, overrides=[*longer, *args.override])
    more = {"points": args.points, "device": device}

    def of_plain(recipe: plain_gpt.Recipe) -> Contestant:
        return Contestant(
            recipe.published,
            lambda b, t, seed: plain_gpt.train(recipe, sources, b, t, seed=seed, **more),
        )

    every = {
        "ours": Contestant(
            us.published, lambda b, t, seed: us.tuned(t).train(b, seed=seed, points=args.points)
        ),
        "nanoGPT": of_plain(recipe),
        "transformers": Contestant(
            hf_trainer.PUBLISHED,
            lambda b, t, seed: hf_trainer.train(us.shape, sources, b, t, seed=seed, **more),
        ),
        "plain-muon": of_plain(plain_gpt.MUON),
    }
    return {name: every[name] for name in args.only}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=75.0, help="of training, each")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, seeds from 1")
    parser.add_argument("--only", nargs="+", choices=NAMES)
    parser.add_argument("--cores", type=int, default=2, help="threads of a contestant")
    parser.add_argument("--processors", action="store_true", help="count processors' seconds")
    parser.add_argument("--points", type=int, default=1, help="evaluations of a run, the last too")
    parser.add_argument("--tune", type=int, metavar="N", help="runs, on the half `select`")
    parser.add_argument("--half", choices=HALVES, help="default: report; with --tune select")
    parser.add_argument("--published", action="store_true", help="rates and warm-ups of recipes")
    parser.add_argument("--vocabulary", type=int, help="entries of the tokenizer; default: ours")
    parser.add_argument("--data", type=Path, help="where tokens are, or are to be made")
    parser.add_argument("--gpu", action="store_true", help="124M on the dataset of --tokens")
    parser.add_argument("--tokens", type=Path, help="--gpu: dataset with a held-out part")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        help="a field of our train.yaml, --a.b=value; its own rate and warm-up count then",
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON each, no table")
    args = parser.parse_args(argv)
    if args.gpu != (args.tokens is not None):
        parser.error("--gpu and --tokens go together")
    if args.gpu and (args.tune or args.half):
        parser.error("--gpu has one held-out part, and is not tuned")
    if args.tune and args.half == "report":
        parser.error("what is tuned on `report` cannot be reported on it")
    if args.processors and args.points != 1:
        parser.error("--processors counts evaluations too: with --points 1 there is but the last")
    args.only = args.only or (NAMES[:-1] if args.gpu else NAMES)
    args.half = args.half or ("select" if args.tune else "report")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(args.cores)
    budget = Budget(seconds=args.seconds, cores=args.cores, processors=args.processors)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="speedrun-")))
        if args.gpu:
            sources = [Source("text", 1.0, args.tokens, args.tokens / "validation")]
        else:
            sources = quickstart_sources(args.data or folder, args.half, args.vocabulary)
        table = Table(sources, args.half, as_json=args.json)
        run = tuned if args.tune else final
        for name, contestant in contestants(args, sources, folder).items():
            try:
                run(args, budget, name, contestant, table)
            except NotThere as error:
                raise SystemExit(f"error: {name}: {error}") from error
        table.compare()


def final(
    args: argparse.Namespace, budget: Budget, name: str, contestant: Contestant, table: Table
) -> None:
    """Run a contestant by each seed."""
    as_published = args.published or args.gpu or args.seconds > LONG_SECONDS
    if name == "ours" and args.override:  # which may be of rates
        as_published = True
    tuning = contestant.published if as_published else TUNED.get(name, contestant.published)
    for seed in range(1, args.seeds + 1):
        table.add(name, seed, tuning, contestant.run(budget, tuning, seed))


def tuned(
    args: argparse.Namespace, budget: Budget, name: str, contestant: Contestant, table: Table
) -> None:
    """Search a contestant's rate and warm-up, in as many steps as fit at its published ones."""
    steps: list[int] = []

    def run(tuning: Tuning) -> float:
        same = replace(budget, fixed_steps=steps[0]) if steps else budget
        points = contestant.run(same, tuning, 1)
        steps.append(points[-1].step)
        table.add(name, 1, tuning, points)
        return table.weighted(points[-1])

    found = tune(run, contestant.published, args.tune)
    best = min(found, key=found.__getitem__)
    print(f"{name}: {best} of {len(found)} runs", file=sys.stderr, flush=True)


class Table:
    """Prints what was measured as it comes, and at the end how far the others are from ours."""

    def __init__(self, sources: Sequence[Source], half: str, *, as_json: bool) -> None:
        self._shares = {source.name: source.share for source in sources}
        self._json = as_json
        self._last: dict[tuple[str, int], Point] = {}
        if as_json:
            return
        for source in sources:
            size = f"{len(source.sizes)} documents, {int(source.sizes.sum()):,} bytes"
            print(f"{source.name}: held out, {half}: {size}")
        head = "".join(f"{name:>15}" for name in self._shares)
        print(f"{'bits per byte':14}{'seed':>4}{'rate':>9}{'warm-up':>9}{head}{'steps':>8}"
              f"{'tokens':>13}{'seconds':>9}")  # fmt: skip

    def weighted(self, point: Point) -> float:
        """Return the bits per byte of the mixture: of each source by its share."""
        return sum(share * point.bits[name].per_byte for name, share in self._shares.items())

    def add(self, name: str, seed: int, tuning: Tuning, points: Sequence[Point]) -> None:
        """Print the points of a run."""
        self._last[name, seed] = points[-1]
        for point in points:
            print(self._line(name, seed, tuning, point), flush=True)

    def compare(self) -> None:
        """Print the differences to ours, document by document, of the same seed."""
        for (name, seed), point in self._last.items():
            us = self._last.get(("ours", seed))
            if us is None or us is point or self._json:
                continue
            less = {each: point.bits[each].less(us.bits[each]) for each in self._shares}
            print(f"{name} - ours".ljust(18) + f"{seed:>4}" + " " * 14 + _cells(less.values()))

    def _line(self, name: str, seed: int, tuning: Tuning, point: Point) -> str:
        if self._json:
            bits = {each: of.per_byte for each, of in point.bits.items()}
            errors = {each: of.error for each, of in point.bits.items()}
            return json.dumps({
                "name": name, "seed": seed, "rate": tuning.rate, "warmup": tuning.warmup,
                "step": point.step, "tokens": point.tokens, "seconds": point.seconds,
                "used": point.used, "bits": bits, "errors": errors,
            })  # fmt: skip
        seconds = f"{point.seconds:>9.1f}"
        if abs(point.used - point.seconds) > 0.05:  # processors counted, and not the clock
            seconds += f" (processors {point.used:.1f})"
        start = f"{name:14}{seed:>4}{tuning.rate:>9.2g}{tuning.warmup:>9.3g}"
        return f"{start}{_cells(point.bits.values())}{point.step:>8,}{point.tokens:>13,}{seconds}"


def _cells(found: Iterable[Measured]) -> str:
    return "".join(f"{of.per_byte:>9.3f} ±{of.error:.3f}" for of in found)


if __name__ == "__main__":
    main()
