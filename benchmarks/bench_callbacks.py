"""What each callback costs: seconds of a step with it over those without, in one process.

    python benchmarks/bench_callbacks.py [--seconds 6] [--only PART]

Every callback of `trainer.callbacks`, in a run of its own of the whole trainer on a small mixture
of random words. Its hooks are called in every other step (without, with, with, without), so that
what else the machine does meets both alike. The ratio is the median over pairs of neighbouring
steps; beside it stand the medians of what the training thread, and the whole process, computed more
in a step with it. Metrics are read at every step, and intervals are 1, so that each step has the
work that is usually done now and then: a callback with `interval: 100` costs a hundredth of its
line. What a callback does at the start, at the end, or in threads of its own while the step without
it runs, is not in the ratio. One row a callback, and of gap_monitor one a part; 6 seconds each are
below 6 minutes together.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

import olm_data
from olm_data.config.values import Values
from olm_data.extras import MissingExtra
from olm_train.callbacks.base import Callback
from olm_train.callbacks.config import CallbacksConfig
from olm_train.distributed.world import World
from olm_train.run.config import RunConfig

BATCH, WARM_UP = 1024, 4
"""Tokens of a step; steps that are not measured."""
OPTIONS: dict[str, dict[str, Any]] = {
    "console_logger": {"log_interval": 1},
    "garbage_collector": {"gc_interval": 1},
    "lm_evaluator": {"datasets": {"held": "tokens"}, "eval_on_finish": False},
    "downstream_evaluator": {"tasks": {"made-up": "task"}, "eval_on_finish": False},
    "samples": {"prompts": ["def "], "eval_on_finish": False},
    "loss_ledger": {},
    "batch_size_scheduler": {
        "batch_sizes": [BATCH],
        "schedule": [{"value": 0, "unit": "steps"}],
    },
    "sequence_length_scheduler": {"min_sequence_length": 128, "warmup_steps": 1_000_000_000},
    "replica_checker": {"interval": 1},
    "gap_monitor": {"interval": 1},
    "hf_exporter": {"export_on_finish": False, "export_interval": 1_000_000_000},
    "metric_saver": {"save_interval": 1},
    "notifier": {"on": ["spike"], "webhook_url": "http://127.0.0.1:9/"},
    "model_merge": {"merge_step": [1_000_000_000], "merge_last_n_steps": 1_000_000_000},
    "profiler": {"skip_first": None},
    "config_saver": {"fname": "experiment.json", "save_data_paths": True},
}
"""What callbacks are given that do nothing in a step, or cannot be, without."""
EVERYTHING = ["params", "grads", "updates", "opt_state", "activations", "activation_grads"]
KINDS = ["max", "mean", "var", "rms", "zeros", "underflow", "ratio"]
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "gap_monitor": {
        "params": {"targets": ["params"]},
        "grads": {"targets": ["grads"]},
        "activations": {"targets": EVERYTHING[4:]},
        "all": {"targets": EVERYTHING, "kinds": KINDS},
        "gradients to disk": {"monitor": False, "dump_gradients": True},
    },
}
"""Further rows: options beside those above."""
OFFLINE = {"WANDB_MODE": "offline", "COMET_START_ONLINE": "0", "COMET_API_KEY": "k"}
FED = ("wandb", "comet", "tensorboard", "trackio")
"""They are fed from the log, so it is written beside them."""
IN_A_STEP = (
    "pre_epoch",
    "pre_load_batch",
    "pre_step",
    "change_batches",
    "post_backward",
    "pre_optim_step",
    "post_step",
    "evaluate",
    "pre_log_metrics",
    "log_metrics",
)


@dataclass(kw_only=True)
class Clock(Callback):
    """Says in which steps hooks are called, and keeps what each step took.

    Attributes:
        seconds: the run ends after so many.
        steps: wall, training thread's and process's seconds of each step, and whether with it.
    """

    priority: ClassVar[int] = 1000

    seconds: float
    on: bool = True
    steps: list[tuple[bool, float, float, float]] = field(default_factory=list)

    def pre_train(self) -> None:
        self._end = time.perf_counter() + self.seconds
        self._last: tuple[float, float, float] | None = None

    def pre_load_batch(self) -> None:
        now = time.perf_counter(), time.thread_time(), time.process_time()
        number = self.trainer.step
        if self._last is not None:
            wall, thread, process = (b - a for a, b in zip(self._last, now, strict=True))
            self.steps.append((self.on, wall, thread, process))
        self.on = number < WARM_UP or number % 4 in (1, 2)
        if now[0] > self._end and len(self.steps) > WARM_UP + 8:
            self.trainer.cancel_run("measured")
        self._last = time.perf_counter(), time.thread_time(), time.process_time()


def switched(inner: Callback, clock: Clock) -> Callback:
    """Return a callback that is `inner` in the steps that the clock says, and outside steps."""
    outer: Any = Callback()
    outer.trainer, outer.priority = inner.trainer, inner.priority

    def forwarded(name: str) -> Any:
        with_it, without = getattr(inner, name), getattr(outer, name)

        def hook(*arguments: Any) -> Any:
            return (with_it if clock.on else without)(*arguments)

        return hook if name in IN_A_STEP else with_it

    names = [n for n in vars(Callback) if not n.startswith("_") and callable(getattr(Callback, n))]
    for name in names:
        setattr(outer, name, forwarded(name))
    return outer  # type: ignore[no-any-return]


def make_mixture(folder: Path) -> Path:
    """Return the lock of a mixture of random words."""
    random.seed(1)
    words = ["".join(random.choices("abcdefgh", k=random.randint(2, 9))) for _ in range(2000)]
    text = folder / "words.jsonl"
    with text.open("w") as file:
        for _ in range(4000):
            line = " ".join(random.choices(words, k=random.randint(20, 400)))
            file.write(f'{{"text": "{line}"}}\n')
    questions = (
        f'{{"context": "{" ".join(random.choices(words, k=40))}", "choices": [" a", " b"]}}\n'
        for _ in range(20)
    )
    (folder / "task.jsonl").write_text("".join(questions))
    tool = [sys.executable, "-c", "from olm_data.cli import main; main()"]
    steps = (
        ["train-tokenizer", str(text), "--vocab-size", "4096", "--output", "tokenizer.json"],
        ["tokenize", str(text), "--tokenizer", "tokenizer.json", "--output", "tokens"],
        ["eval-set", "build", "task.jsonl", "--tokenizer", "tokenizer.json", "--output", "task"],
    )
    for step in steps:
        subprocess.run([*tool, *step], cwd=folder, check=True, capture_output=True)
    manifest = folder / "mix.yaml"
    manifest.write_text(
        "version: 1\nseed: 1\nsequence_length: 256\nsources: {words: {data: tokens}}\n"
        "stages: [{name: main, epochs: {words: 1}}]\n"
    )
    olm_data.mix(str(manifest))
    return folder / "mix.lock.json"


def registered() -> list[str]:
    """The names in `trainer.callbacks`, but for `own`."""
    return list(CallbacksConfig.kinds())


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield title, callback and options of each row."""
    for name in registered():
        yield name, name, OPTIONS.get(name, {})
        for part, options in PARTS.get(name, {}).items():
            more = {} if options.get("monitor") is False else OPTIONS[name]
            yield f"{name}, {part}", name, more | options


def configuration(
    args: argparse.Namespace, lock: Path, folder: str, name: str, options: dict[str, Any]
) -> RunConfig:
    """The configuration of a run with one callback, and without those that are there otherwise."""
    default = {each.name for each in fields(CallbacksConfig) if each.default is not None}
    callbacks: dict[str, Any] = {each: {"enabled": False} for each in default - {"own"}}
    if name in FED:
        callbacks["metrics_logger"] = {}
    values = {
        "model": {"d_model": args.width, "n_layers": args.layers, "n_heads": 4},
        "data_loader": {"mixture": str(lock), "global_batch_size": BATCH},
        "train_module": {"rank_microbatch_size": BATCH // 2},
        "trainer": {
            "save_folder": folder,
            "metrics_collect_interval": 1,
            "callbacks": callbacks | {name: options},
        },
        "threads": 1,
    }
    return RunConfig.resolve(Values(values, folder=lock.parent))


def measure(
    args: argparse.Namespace, lock: Path, name: str, options: dict[str, Any]
) -> list[tuple[bool, float, float, float]]:
    """Return the steps of a run with a callback in every other one."""
    with tempfile.TemporaryDirectory(dir=lock.parent) as folder:
        config = configuration(args, lock, folder, name, options)
        trainer, clock = config.build(World()), Clock(seconds=args.seconds)
        if name in trainer.callbacks:  # the checkpointer is part of the trainer
            trainer.callbacks[name] = switched(trainer.callbacks[name], clock)
        trainer.add_callback("clock", clock)
        trainer.fit()
    return clock.steps[WARM_UP:]


def row(title: str, steps: list[tuple[bool, float, float, float]]) -> str:
    """Return the row of a callback: medians over pairs of neighbours, one with and one without."""
    pairs = []
    for one, other in zip(steps[::2], steps[1::2], strict=False):
        if one[0] != other[0]:
            pairs.append((one, other) if one[0] else (other, one))
    median = statistics.median
    ratio = median(having[1] / without[1] for having, without in pairs)
    thread, process = (median(a[k] - b[k] for a, b in pairs) * 1e3 for k in (2, 3))
    without = median(b[1] for _, b in pairs) * 1e3
    return (
        f"| {title} | {len(pairs)} | {without:.1f} ms | {ratio:.3f} | {thread:+.2f} ms | "
        f"{process:+.2f} ms |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each callback")
    parser.add_argument("--only", default="", help="part of the names to measure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| callback | pairs | step without | ratio | training thread | process |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= OFFLINE | {"TRACKIO_DIR": folder}
        lock = make_mixture(Path(folder))
        for title, name, options in cases():
            if args.only in title:
                try:
                    print(row(title, measure(args, lock, name, options)), flush=True)
                except MissingExtra as error:
                    print(f"| {title} | not measured: {error.what} | | | | |", flush=True)


if __name__ == "__main__":
    main()
