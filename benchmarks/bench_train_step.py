"""Tokens per second of a training step: ours, ours without document masking, and a plain GPT's.

    python benchmarks/bench_train_step.py --preset olm-4m --sequence-length 256

The plain step is what one would write in an afternoon with torch alone: separate linear layers,
`is_causal` attention without documents, RoPE, SwiGLU, mean cross entropy, fused AdamW, clipping;
autocast for bf16. Same shape, same parameter count, same process, rounds taken in turn. The last
lines are ratios: how much the machinery of an exact step and the document mask cost.

With --peers: the transformers library's LlamaForCausalLM of the same sizes on the same tokens, in
the same plain loop, in an environment and a process of its own; a line says why where that fails.

    python benchmarks/bench_train_step.py --gpu-sizes --rows 8 --mean-document 800 \\
        --attention varlen --param-dtype bfloat16 --compile --vocab-size 50304 --peers

--gpu-sizes, for a GPU: 125M, 350M and 1B at 2,048 and 4,096 tokens a row. Each contestant is alone
on the device, so that its peak memory is its own. MFU counts the query-key pairs that exist: the
sum of n (n + 1) / 2 over documents where they are masked, over whole rows where they are not.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from peers.environments import NotInstalled, default_root
from peers.llama import peer_loop
from torch import Tensor, nn

from olm_train.data.batch import Batch
from olm_train.distributed.world import World
from olm_train.estimate.flops import num_flops_per_token
from olm_train.estimate.gpus import device_peak_flops
from olm_train.model.attention import ATTENTION_BACKENDS
from olm_train.model.config import DecoderConfig
from olm_train.model.loss_config import LossConfig
from olm_train.model.loss_config import Name as LossName
from olm_train.model.presets import PRESETS, preset
from olm_train.optim.adamw import AdamWConfig
from olm_train.parallel.config import DTYPES, DataParallelConfig
from olm_train.train_module import TransformerTrainModule
from olm_train.train_module_config import TransformerTrainModuleConfig

GPU_SIZES = ("olm-125m", "olm-350m", "olm-1b")
GPU_LENGTHS = (2048, 4096)
PEER = "transformers Llama, unmasked"


class PlainBlock(nn.Module):
    """A block as it stands in many a tutorial."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.c, d, size = c, c.d_model, c.head_size
        self.norm_1, self.norm_2 = nn.RMSNorm(d, eps=c.norm.eps), nn.RMSNorm(d, eps=c.norm.eps)
        self.q = nn.Linear(d, c.n_heads * size, bias=False)
        self.k = nn.Linear(d, c.kv_heads * size, bias=False)
        self.v = nn.Linear(d, c.kv_heads * size, bias=False)
        self.o = nn.Linear(c.n_heads * size, d, bias=False)
        self.gate = nn.Linear(d, c.feed_forward.width(c), bias=False)
        self.up = nn.Linear(d, c.feed_forward.width(c), bias=False)
        self.down = nn.Linear(c.feed_forward.width(c), d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm_1(x)
        q, k, v = (
            w(h).unflatten(-1, (-1, self.c.head_size)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        q, k = (y * cos + torch.cat((-y.chunk(2, -1)[1], y.chunk(2, -1)[0]), -1) * sin
                for y in (q, k))  # fmt: skip
        grouped = self.c.n_heads != self.c.kv_heads
        y = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True, enable_gqa=grouped)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class PlainGPT(nn.Module):
    """Embedding, blocks, norm, head; the same parameter count as our decoder of this config."""

    def __init__(self, c: DecoderConfig, sequence_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(PlainBlock(c) for _ in range(c.n_layers))
        self.norm = nn.RMSNorm(c.d_model, eps=c.norm.eps)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        if c.head.tied:
            self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            # torch's own table of deviation 1 makes subnormal probabilities, slow on a CPU.
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        frequencies = c.positions.theta ** (-torch.arange(0, c.head_size, 2) / c.head_size)
        angles = (torch.arange(sequence_length)[:, None] * frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class Unmasked(Batch):
    """A batch without documents: the loader never makes one."""

    def through(self, model: Callable[..., Any], reduce: Callable[[Any, Tensor], Any]) -> Any:
        return model(self.input_ids, reduce=reduce)


def random_batch(rows: int, length: int, vocab: int, document: int, world: World) -> Batch:
    """Rows of documents of random length with mean `document`, cut as the loader cuts them."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab, (rows, length + 1), generator=generator)
    is_start = torch.rand(rows, length + 1, generator=generator) < 1 / document
    is_start[:, 0] = True
    labels = tokens[:, 1:].masked_fill(is_start[:, 1:], -100)
    begins = torch.nonzero(is_start[:, :-1].flatten()).flatten()
    offsets = torch.cat((begins, torch.tensor([rows * length])))
    return Batch(
        input_ids=tokens[:, :-1].contiguous(),
        labels=labels,
        cu_seqlens=offsets.to(torch.int32),
        max_seqlen=length,
        rows=torch.arange(rows),
    ).to(world.device)


def our_step(args: argparse.Namespace, config: DecoderConfig, world: World, batches: list[Batch]):  # type: ignore[no-untyped-def]
    """A function that takes one of our steps."""
    options = TransformerTrainModuleConfig(
        rank_microbatch_size=args.rows * args.sequence_length,
        loss=LossConfig(name=args.loss),
        optim=AdamWConfig(lr=1e-4),
        dp_config=DataParallelConfig(param_dtype=args.param_dtype),
        compile_model=args.compile,
    )
    module = TransformerTrainModule(options, config, seed=0, world=world)
    return lambda: module.train_step(batches, 1, 1)


def plain_step(args: argparse.Namespace, config: DecoderConfig, world: World, batches: list[Batch]):  # type: ignore[no-untyped-def]
    """A function that takes one step of the plain GPT."""
    torch.manual_seed(0)
    model = PlainGPT(config, args.sequence_length).to(world.device)
    assert sum(p.numel() for p in model.parameters()) == config.num_params
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    if args.compile:
        for block in model.blocks:
            block.compile(dynamic=False)
    dtype = DTYPES[args.param_dtype]

    def step() -> None:
        for batch in batches:
            with torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32):
                logits = model(batch.input_ids)
                loss = F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten())
            (loss / len(batches)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm.isfinite()  # our step looks at its norm too
        optimizer.step()
        optimizer.zero_grad()

    return step


def shape_and_batches(
    args: argparse.Namespace, world: World
) -> tuple[DecoderConfig, list[Batch], list[Batch]]:
    """The decoder's config, and the same tokens with their documents and without."""
    config = preset(
        args.preset,
        vocab_size=args.vocab_size,
        head={"tied": True},
        attention={"backend": args.attention},
    )
    batch = random_batch(
        args.rows, args.sequence_length, args.vocab_size, args.mean_document, world
    )
    whole = Batch.of((batch.input_ids, batch.labels))
    free = Unmasked(**{field.name: getattr(whole, field.name) for field in fields(whole)})
    return config, [batch] * args.micro_batches, [free] * args.micro_batches


def alone(args: argparse.Namespace, world: World) -> Iterator[dict[str, Any]]:
    """Measure each contestant of --gpu-sizes by itself; a result each."""
    cuda = world.device.type == "cuda"
    peak = device_peak_flops(torch.cuda.get_device_name()) if cuda else None
    for args.preset in GPU_SIZES:
        for args.sequence_length in GPU_LENGTHS:
            config, masked, unmasked = shape_and_batches(args, world)
            tokens = args.rows * args.sequence_length * args.micro_batches
            contestants: dict[str, tuple[Any, list[Batch]]] = {
                "ours, documents masked": (our_step, masked),
                "ours, unmasked": (our_step, unmasked),
                "plain torch GPT, unmasked": (plain_step, unmasked),
            }
            if args.peers:
                contestants[PEER] = (peer_loop, unmasked)
            for name, (make, batches) in contestants.items():
                about = {"preset": args.preset, "length": args.sequence_length, "name": name}
                pairs = float(batches[0].positions.sum()) / batches[0].positions.numel() + 1
                try:
                    best, memory = timed_alone(make, args, config, world, batches)
                except (NotInstalled, torch.cuda.OutOfMemoryError) as error:
                    what = "failed" if make is peer_loop else "skipped"
                    yield {**about, what: str(error).splitlines()[0]}
                    continue
                flops = tokens / best * num_flops_per_token(config, pairs_per_token=pairs)
                yield {
                    **about,
                    "tokens_per_second": tokens / best,
                    "mfu": flops / peak if peak else None,
                    "memory_bytes": memory,
                }


def timed_alone(
    make: Any, args: argparse.Namespace, config: DecoderConfig, world: World, batches: list[Batch]
) -> tuple[float, int | None]:
    """Seconds of the fastest step, and the peak memory, with nothing else on the device."""
    gc.collect()
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        if make is peer_loop:
            loop = peer_loop(args, config, world, batches, Path(folder))
            try:
                best = min([loop.step() for _ in range(args.rounds + 2)][2:])
            finally:
                loop.close()
            return best, loop.memory
        step = make(args, config, world, batches)
        best = min([seconds(step, world) for _ in range(args.rounds + 2)][2:])
    return best, torch.cuda.max_memory_allocated() if cuda else None


def print_alone(args: argparse.Namespace, world: World) -> int:
    """Print what --gpu-sizes measures, line by line as it comes; return the exit code."""
    failed = False
    if not args.json:
        print(f"{'preset':10}{'row':>6}  {'':30}{'tokens/s':>12}{'MFU':>8}{'GB':>8}")
    for result in alone(args, world):
        failed |= "failed" in result
        if args.json:
            print(json.dumps(result), flush=True)
            continue
        line = f"{result['preset']:10}{result['length']:>6}  {result['name']:30}"
        why = [f"{what}: {result[what]}" for what in ("failed", "skipped") if what in result]
        if why:
            print(f"{line}{why[0]}", flush=True)
            continue
        mfu = "-" if result["mfu"] is None else f"{result['mfu']:.1%}"
        memory = "-" if result["memory_bytes"] is None else f"{result['memory_bytes'] / 1e9:.1f}"
        speed = f"{result['tokens_per_second']:>12,.0f}"
        print(f"{line}{speed}{mfu:>8}{memory:>8}", flush=True)
    return 1 if failed else 0


def seconds(step: Callable[[], object], world: World) -> float:
    """Wall time of one step, the device's queue drained."""
    start = time.perf_counter()
    step()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="olm-4m")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--mean-document", type=int, default=100, help="tokens")
    parser.add_argument("--attention", choices=sorted(ATTENTION_BACKENDS), default="sdpa")
    parser.add_argument("--loss", choices=get_args(LossName), default="auto")
    parser.add_argument("--param-dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--compile", action="store_true", help="compile each block, both models")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's own choice")
    parser.add_argument("--gpu-sizes", action="store_true", help="the set for a GPU, see above")
    parser.add_argument("--peers", action="store_true", help="measure transformers' Llama too")
    parser.add_argument(
        "--peer-python", type=Path, help="Python with torch and transformers; default: one is made"
    )
    parser.add_argument("--peer-envs", type=Path, default=default_root(), help="where it is made")
    parser.add_argument("--json", action="store_true", help="results as one JSON object")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    world = World.start()
    if args.gpu_sizes:
        raise SystemExit(print_alone(args, world))
    config, masked, unmasked = shape_and_batches(args, world)
    steps = {
        "ours, documents masked": our_step(args, config, world, masked),
        "ours, unmasked": our_step(args, config, world, unmasked),
        "plain torch GPT, unmasked": plain_step(args, config, world, masked),
    }
    take = {name: partial(seconds, step, world) for name, step in steps.items()}
    with ExitStack() as stack:
        if args.peers:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            try:
                loop = peer_loop(args, config, world, masked, folder)
            except NotInstalled as error:
                raise SystemExit(f"error: {PEER}: {error}") from error
            stack.callback(loop.close)
            take[PEER] = loop.step
        for once in take.values():
            once(), once()
        times: dict[str, list[float]] = {name: [] for name in take}
        for _ in range(args.rounds):  # in turn, so that a busy moment of the machine hits all
            for name, once in take.items():
                times[name].append(once())

    tokens = args.rows * args.sequence_length * args.micro_batches
    best = {name: tokens / min(values) for name, values in times.items()}
    median = {name: tokens / statistics.median(values) for name, values in times.items()}
    ours, free, plain = list(best.values())[:3]
    ratios = {
        "masked / unmasked": ours / free,
        "ours masked / plain": ours / plain,
        "ours unmasked / plain": free / plain,
    }
    if PEER in best:
        ratios["ours masked / transformers"] = ours / best[PEER]
    device = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    pairs = sum(float(batch.positions.sum()) for batch in masked) / tokens + 1
    flops = ours * num_flops_per_token(config, pairs_per_token=pairs)
    peak = device_peak_flops(device)
    if args.json:
        print(json.dumps({"tokens_per_second": best, "median": median, "ratios": ratios}))
        return
    print(
        f"{args.preset} ({config.num_params / 1e6:.1f}M parameters), {args.micro_batches} x "
        f"{args.rows} x {args.sequence_length} tokens, documents of {args.mean_document} tokens, "
        f"{args.param_dtype}, attention {args.attention}, loss {args.loss}, "
        f"compile {args.compile}, {device}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}",
        file=sys.stderr,
    )
    print(f"{'':28}{'best':>14}{'median':>14}   tokens/s")
    for name in best:
        print(f"{name:28}{best[name]:>14,.0f}{median[name]:>14,.0f}")
    print(f"model work, masked: {flops / 1e9:,.1f} GFLOP/s", end="")
    print(f", MFU {flops / peak:.1%}" if peak else " (no MFU: peak of this device unknown)")
    for name, ratio in ratios.items():
        print(f"{name:28}{ratio:>14.2f}")
    if world.device.type == "cuda":
        print(
            f"peak memory of the three together: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
        )


if __name__ == "__main__":
    main()
