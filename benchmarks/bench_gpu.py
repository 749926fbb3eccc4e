"""One GPU in about ten minutes: its tests, then tokens a second, MFU and memory of a training step.

    python benchmarks/bench_gpu.py > gpu.md

A Markdown table on stdout, progress on stderr. Rows come in the order of their importance; what
fails is a row with its reason, what there was no time for (--minutes) is named below the table.
Each row is a train module alone on the device, taking the steps that a run takes: the fastest of
some, after two that compile and warm up. A step is of --step-tokens tokens, in micro-batches of
as many as fit by our estimate of memory, which stands beside what was measured.

FLOPs are those of `olm_train/estimate/flops.py`: 6 for each parameter of a matrix that a token is
multiplied with, the head among them, and 12 * layers * heads * head_dim for each pair of a query
and a key that it sees: within its document where documents are masked, within the window where a
layer has one, the causal half of a row where they are not. MFU is their share of the dense bf16
peak, in float8 too. A rate in float8 counts only beside the row of the same loss above it.

    python benchmarks/bench_gpu.py --tiny --device cpu    a stand-in of a minute, without a GPU
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from bench_train_step import Unmasked, random_batch, seconds, timed_alone

from olm_train.data.batch import Batch
from olm_train.distributed.world import World
from olm_train.estimate.flops import attention_pairs, num_flops_per_token
from olm_train.estimate.gpus import HEADROOM, device_peak_flops
from olm_train.estimate.memory import TrainingTensors, memory_of_step
from olm_train.extensions.generate.engine import Engine, TextRequest
from olm_train.extensions.generate.runner import CachedRunner
from olm_train.extensions.generate.sampling import Sampling
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.model.presets import depth_fields, preset
from olm_train.optim.adamw import AdamWConfig
from olm_train.parallel.config import DataParallelConfig
from olm_train.parallel.float8 import Float8Config
from olm_train.train_module import TransformerTrainModule
from olm_train.train_module_config import TransformerTrainModuleConfig

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 50_304
CONTROL = "like nanochat d24"
EXPERTS = {"name": "moe", "n_experts": 16, "top_k": 2, "hidden_size": 1408}
GOALS = {"olm-125m": 470e3, "olm-350m": 185e3, "olm-1b": 58e3, CONTROL: 100e3}
"""Tokens a second at 2,048 tokens a row, compiled, on one H100 or H200: 46 % MFU and a little less.
The control's is what nanochat reports for eight, divided by eight."""
COLUMNS = ("model", "row", "documents", "attention", "compiled", "products", "tokens/s", "goal")
COLUMNS += ("MFU", "GB", "estimated", "loss")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is measured."""

    model: str = "olm-350m"
    length: int = 2048
    masked: bool = True
    attention: str = "varlen"
    compiled: bool = True
    float8: str | None = None

    def cells(self) -> list[str]:
        """Return the cells that say so."""
        documents, compiled = ("masked" if self.masked else "not masked"), self.compiled
        plain = [self.model, f"{self.length:,}", documents, self.attention]
        return [*plain, "yes" if compiled else "no", self.float8 or "bf16"]

    @property
    def goal(self) -> float | None:
        """Tokens a second that were hoped for."""
        plain = replace(self, masked=True) == Row(model=self.model)
        return GOALS.get(self.model) if plain else None


SIZES = ("olm-125m", "olm-350m", "olm-1b")
ROWS = (
    *(Row(model=size) for size in SIZES),
    Row(model=CONTROL, masked=False),
    *(Row(model=size, masked=False) for size in SIZES),
    Row(model="olm-1b", float8="rowwise"),
    *(Row(attention=name) for name in ("sdpa", "flex")),
    Row(compiled=False),
    *(Row(model=size, length=4096) for size in SIZES),
    Row(model="16 experts, 2 a token"),
    Row(model="olm-1b", float8="tensorwise"),
    *(Row(model=size, length=4096, masked=False) for size in SIZES),
    *(Row(length=4096, attention=name) for name in ("sdpa", "flex")),
    Row(model="olm-125m", compiled=False),
)
TINY = 32
"""Tokens of a row of the stand-ins."""


def stand_ins() -> tuple[Row, ...]:
    """Return the rows that are left where all are short, uncompiled and by sdpa or flex."""
    changed = (
        replace(row, length=TINY, compiled=False, attention=row.attention.replace("varlen", "sdpa"))
        for row in ROWS
    )
    return tuple(dict.fromkeys(changed))


@dataclass
class Bench:
    """Measures rows on a device."""

    args: argparse.Namespace
    world: World
    begun: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list)

    @property
    def cuda(self) -> bool:
        return self.world.device.type == "cuda"

    def has_time(self, what: str) -> bool:
        """Whether there is time for something; else it is named later."""
        late = time.monotonic() - self.begun > 60 * self.args.minutes
        if late:
            self.left_out.append(what)
        else:
            print(f"{time.monotonic() - self.begun:5.0f} s  {what}", file=sys.stderr, flush=True)
        return not late

    def shape(self, row: Row) -> DecoderConfig:
        """Return the model of a row, or its stand-in."""
        changes: dict[str, Any] = {"attention": {"backend": row.attention}, "head": {"tied": True}}
        if row.model == CONTROL:
            changes["head"] = {"tied": False}
        if "experts" in row.model:
            changes["feed_forward"] = EXPERTS | ({"hidden_size": 64} if self.args.tiny else {})
        if self.args.tiny:
            # float8 is for the blocks between the first and the last
            return preset("olm-1m", vocab_size=256, n_layers=3, **changes)
        if row.model == CONTROL:
            return DecoderConfig(vocab_size=65_536, **(depth_fields(24) | changes))
        name = row.model if row.model in SIZES else "olm-125m"
        return preset(name, vocab_size=VOCABULARY, **changes)

    def options(self, row: Row, tokens: int) -> TransformerTrainModuleConfig:
        """Return those of a train module."""
        float8 = row.float8 and Float8Config(ao_recipe=row.float8, emulate=self.args.tiny)  # type: ignore[arg-type]
        return TransformerTrainModuleConfig(
            rank_microbatch_size=tokens,
            optim=AdamWConfig(lr=1e-4),
            dp_config=DataParallelConfig(param_dtype="bfloat16"),
            compile_model=row.compiled,
            float8_config=float8 or None,
        )

    def measure(self, row: Row) -> list[str]:
        """Return the cells of what was measured.

        Raises:
            Exception: whatever keeps it from being measured.
        """
        torch._dynamo.reset()
        config, length = self.shape(row), row.length
        tokens, estimate = self._micro_batch(row, config, length)
        vocabulary, document = config.vocab_size, max(8, length * 2 // 5)
        batch = random_batch(tokens // length, length, vocabulary, document, self.world)
        if not row.masked:
            whole = Batch.of((batch.input_ids, batch.labels))
            batch = Unmasked(**{each.name: getattr(whole, each.name) for each in fields(whole)})
        batches = [batch] * max(1, self.args.step_tokens // tokens)
        losses: list[Any] = []

        def make(*_: object) -> Callable[[], object]:
            module = TransformerTrainModule(
                self.options(row, tokens), config, seed=0, world=self.world
            )
            for line in module.describe() if row.float8 else ():
                print(f"         {line}", file=sys.stderr)
            return lambda: losses.append(module.train_step(batches, 1, 1)["train/CE loss"])

        best, memory = timed_alone(make, self.args, config, self.world, batches)
        rate = len(batches) * tokens / best
        pairs = float(attention_pairs(config, batch.positions)) / tokens
        work = rate * num_flops_per_token(config, pairs_per_token=pairs)
        peak = device_peak_flops(torch.cuda.get_device_name()) if self.cuda else None
        goal = row.goal
        return [
            f"{rate:,.0f}",
            f"{goal / 1e3:.0f}K ({rate / goal:.2f})" if goal else "",
            f"{work / peak:.1%}" if peak else "-",
            "-" if memory is None else f"{memory / 1e9:.1f}",
            f"{estimate / 1e9:.1f}",
            f"{float(losses[-1]):.3f}",
        ]

    def _micro_batch(self, row: Row, config: DecoderConfig, length: int) -> tuple[int, int]:
        """Return the tokens of a micro-batch, and the bytes that a step is estimated to take."""
        have = torch.cuda.get_device_properties(0).total_memory if self.cuda else 16 << 30
        tokens = self.args.step_tokens
        while tokens > length:
            estimate = self._estimate(row, config, length, tokens)
            if estimate <= have * (1 - 2 * HEADROOM):
                return tokens, estimate
            tokens //= 2
        return length, self._estimate(row, config, length, length)

    def _estimate(self, row: Row, config: DecoderConfig, length: int, tokens: int) -> int:
        options = self.options(row, tokens)
        counted = TrainingTensors.count(config, options.optim)
        return memory_of_step(
            config, options, sequence_length=length, world_size=1, counted=counted
        ).total

    def table(self, rows: tuple[Row, ...]) -> Iterator[str]:
        """Yield the lines of the table, each as it is there."""
        yield f"| {' | '.join(COLUMNS)} |"
        yield f"|{'---|' * len(COLUMNS)}"
        for row in rows:
            cells = row.cells()
            if not self.has_time(", ".join(cells)):
                continue
            found = self.tried(lambda row=row: self.measure(row))
            if isinstance(found, str):
                found = [found] + [""] * (len(COLUMNS) - len(cells) - 1)
            yield f"| {' | '.join([*cells, *found])} |"

    def tried(self, measure: Callable[[], Any]) -> Any:
        """Return what is measured, or in words why it could not be."""
        try:
            return measure()
        except Exception as error:  # whatever it is, the other rows are to come
            words = (str(error).strip() or type(error).__name__).splitlines()[0]
            reason = f"failed: {words[:160].replace('|', '/')}"
        gc.collect()  # what the error has held
        return reason

    def generation(self) -> str:
        """Return tokens a second of 64 texts together, in bfloat16."""
        config = self.shape(Row(attention="sdpa"))
        model = Decoder(config)
        init_parameters(model, 0)
        model = model.to(self.world.device, torch.bfloat16).eval()
        prompts, new = (4, 4) if self.args.tiny else (64, 128)
        draw = torch.Generator().manual_seed(0)
        asked = [
            TextRequest(
                prompt=tuple(torch.randint(1, config.vocab_size, (16,), generator=draw).tolist()),
                sampling=Sampling(temperature=0),
                max_new_tokens=new,
            )
            for _ in range(prompts)
        ]

        def write() -> object:
            return Engine(CachedRunner(model, self.world.device)).run(asked)

        best = min([seconds(write, self.world) for _ in range(3)])
        return f"{prompts * new / best:,.0f} tokens/s, {prompts} texts of {new} new tokens together"


def tests_of_gpus(tiny: bool) -> str:
    """Return the last line of pytest over all that is marked `gpu`."""
    files = [
        str(path)
        for path in sorted((ROOT / "tests" / "olm_train").rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text()
    ]
    command = [sys.executable, "-m", "pytest", "-rfs", "-p", "no:cacheprovider", "-m", "gpu"]
    command += files[:1] if tiny else files
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = [line.strip("= ") for line in done.stdout.splitlines() if line.strip("= ")]
    found = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    return f"exit code {done.returncode}; {'; '.join([*found, *lines[-1:]])[:1000]}"


def device_words(world: World) -> str:
    """Return the device, its clocks and its limit of power, as its driver gives them."""
    if world.device.type != "cuda":
        return f"CPU, {torch.get_num_threads()} threads: the numbers mean nothing"
    asked = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,memory.total"
    try:
        line = subprocess.run(
            ["nvidia-smi", "-i", "0", f"--query-gpu={asked}", "--format=csv,noheader"],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout.strip()  # fmt: skip
        pairs = zip(asked.split(","), line.split(", "), strict=False)
        return "; ".join(f"{name} {value}" for name, value in pairs)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{torch.cuda.get_device_name()}; clocks and limit of power unknown: {error}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="no row begins later")
    parser.add_argument("--step-tokens", type=int, default=131_072)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of a row")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="stand-ins, to try this program out")
    parser.add_argument("--no-tests", action="store_true", help="leave the tests out")
    args = parser.parse_args()
    if args.tiny:
        args.step_tokens, args.rounds = 4 * TINY, 1
    elif args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU here; --tiny --device cpu tries the program out")
    return args


def main() -> None:
    """Print all of it."""
    args = arguments()
    world = World() if args.device == "cpu" else World.start()
    bench = Bench(args, world)
    print("# One GPU" + (", tiny stand-ins for all models" if args.tiny else ""), flush=True)
    print(f"\n{device_words(world)}; torch {torch.__version__}, CUDA {torch.version.cuda}.")
    print("Goals are of H100 and H200, with their part that was reached. FLOPs: 6 a parameter of")
    print("matrices, the head's too, and 12 layers heads head_dim a pair of query and key that is")
    print("seen: documents, windows and the causal half counted. GB: peak, and by our estimate.\n")
    if not args.no_tests and bench.has_time("tests marked gpu"):
        print(f"Tests marked gpu: {bench.tried(lambda: tests_of_gpus(args.tiny))}.\n", flush=True)
    for line in bench.table(stand_ins() if args.tiny else ROWS):
        print(line, flush=True)
    if bench.has_time("generation"):
        print(f"\nGeneration, olm-350m, bf16: {bench.tried(bench.generation)}.")
    if bench.left_out:
        print(f"\nNot run, for want of time ({args.minutes:g} minutes):\n")
        print("\n".join(f"* {what}" for what in bench.left_out))


if __name__ == "__main__":
    main()
