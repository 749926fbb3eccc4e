"""Bits per byte for the time it takes: ours, nanoGPT's recipe, transformers' Trainer.

    python benchmarks/speedrun.py --seconds 75 --seeds 2
    python benchmarks/speedrun.py --seconds 600 --seeds 1

Each contestant learns from the same documents, the quickstart's, 80 % code and 20 % documentation,
for the same time on the same cores, and is measured on the same held-out documents. Time is that
of training alone: tokens are there, evaluations, imports and saves do not count, compilers do where
a contestant compiles on a CPU. The number of steps, which a schedule has to know, comes from a
throwaway run of twelve; what the run then took stands beside it. Held-out documents are cut into
rows as long as those trained on, which do not overlap.

* ours: `pipelines/quickstart/train.yaml` by its own command, a rank a core; for --seconds above
  300 with the larger model of `LONG`.
* nanoGPT: the recipe for a CPU of its README: characters, 4 layers, width 128, rows of 64, 12 a
  batch, rate 1e-3 down to 1e-4, fp32; steps as the time allows.
* transformers: `Trainer` by the options of the library's course, our tokenizer and shape, bf16.

--processors counts seconds of processors in place of the clock's, as many as --seconds times the
cores: for a machine that others use. A run on quiet cores has a little less than one a core.

For a GPU, 124M on shards of your own, loss against time:

    olm-data tokenize --source fineweb-edu --tokenizer gpt2 --holdout 0.001 --output tokens/fineweb
    python benchmarks/speedrun.py --gpu --tokens tokens/fineweb --seconds 1800 --points 10
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from speedruns import hf_trainer, ours, plain_gpt
from speedruns.budget import Budget, Point
from speedruns.hf_trainer import NotThere
from speedruns.text import Source, quickstart_sources

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
model: {preset: olm-125m, tie_embeddings: true, vocab_multiple: 128, qk_norm: head}
data_loader: {mixture: mixture.lock.json, global_batch_size: 491520}
train_module:
  rank_microbatch_size: 16384
  optim: {name: muon, lr: 2.0e-3}
  scheduler: {name: wsd, warmup_fraction: 0.02, decay_fraction: 0.5}
  dp_config: {param_dtype: bfloat16}
trainer: {save_folder: run}
"""

Run = Callable[[Budget, int], list[Point]]


def contestants(
    args: argparse.Namespace, sources: Sequence[Source], folder: Path
) -> dict[str, Run]:
    """Return what takes a budget and a seed and trains, by name."""
    if args.gpu:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        (folder / "train.yaml").write_text(GPU_CONFIG)
        us = ours.Ours(folder / "train.yaml", sources, GPU_LENGTH, ranks=1, overrides=args.override)
        recipe = plain_gpt.GPU
    else:
        device, recipe = torch.device("cpu"), plain_gpt.CPU
        longer = LONG if args.seconds > LONG_SECONDS else []
        us = ours.quickstart(sources, ranks=args.cores, overrides=[*longer, *args.override])
    more = {"points": args.points, "device": device}
    every: dict[str, Run] = {
        "ours": lambda budget, seed: us.train(budget, seed=seed, points=args.points),
        "nanoGPT": lambda b, seed: plain_gpt.train(recipe, sources, b, seed=seed, **more),
        "transformers": lambda b, seed: hf_trainer.train(us.shape, sources, b, seed=seed, **more),
    }
    return {name: every[name] for name in args.only}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    names = ("ours", "nanoGPT", "transformers")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=75.0, help="of training, each")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, seeds from 1")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--cores", type=int, default=2, help="threads of a contestant")
    parser.add_argument("--processors", action="store_true", help="count processors' seconds")
    parser.add_argument("--points", type=int, default=1, help="evaluations of a run, the last too")
    parser.add_argument(
        "--data", type=Path, help="the quickstart's folder `out`, or where to make its tokens"
    )
    parser.add_argument("--gpu", action="store_true", help="124M on the dataset of --tokens")
    parser.add_argument("--tokens", type=Path, help="--gpu: dataset with a held-out part")
    parser.add_argument(
        "--override", action="append", default=[], help="a field of our train.yaml, --a.b=value"
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON each, no table")
    args = parser.parse_args(argv)
    if args.gpu != (args.tokens is not None):
        parser.error("--gpu and --tokens go together")
    if args.processors and args.points != 1:
        parser.error("--processors counts evaluations too: with --points 1 there is but the last")
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
            sources = quickstart_sources(args.data or folder)
        names = [source.name for source in sources]
        if not args.json:
            head = "".join(f"{name:>9}" for name in names)
            print(f"{'bits per byte':16}{'seed':>4}{head}{'steps':>8}{'tokens':>13}{'seconds':>9}")
        finals: dict[str, list[Point]] = {}
        for seed in range(1, args.seeds + 1):
            for name, run in contestants(args, sources, folder).items():
                try:
                    points = run(budget, seed)
                except NotThere as error:
                    print(f"{name}: skipped: {error}", file=sys.stderr, flush=True)
                    continue
                finals.setdefault(name, []).append(points[-1])
                for point in points:
                    print(line(name, seed, point, names, as_json=args.json), flush=True)
        if args.seeds > 1 and not args.json:
            for name, found in finals.items():
                means = (statistics.mean(point.bits[each] for point in found) for each in names)
                print(f"{name:16}mean" + "".join(f"{mean:>9.3f}" for mean in means))


def line(name: str, seed: int, point: Point, sources: Sequence[str], *, as_json: bool) -> str:
    """Return a point as a line of the table, or as JSON."""
    if as_json:
        return json.dumps({"name": name, "seed": seed, **asdict(point)})
    bits = "".join(f"{point.bits[each]:>9.3f}" for each in sources)
    seconds = f"{point.seconds:>9.1f}"
    if abs(point.used - point.seconds) > 0.05:  # processors counted, and not the clock
        seconds += f" (processors {point.used:.1f})"
    return f"{name:16}{seed:>4}{bits}{point.step:>8,}{point.tokens:>13,}{seconds}"


if __name__ == "__main__":
    main()
