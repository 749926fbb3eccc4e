"""Short training runs over a fixed global batch, cut in any way, and what they leave behind."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.batches import make_batch

from olm_data.errors import OlmError
from olm_data.storage.store import Store
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.manifest import CheckpointManifest, Kind
from olm_train.checkpoint.save import Contents, save_checkpoint
from olm_train.data.batch import Batch
from olm_train.distributed.waiting import RanksLostError, RankWatchdog
from olm_train.distributed.world import World
from olm_train.model.config import DecoderConfig
from olm_train.model.shards import like, local_blocks
from olm_train.optim.adamw import AdamWConfig
from olm_train.optim.schedule import CosineWithWarmup
from olm_train.optim.state import OptimizerState, make_room
from olm_train.parallel.config import DataParallelConfig
from olm_train.train_module import TransformerTrainModule
from olm_train.train_module_config import TransformerTrainModuleConfig

MODEL = DecoderConfig(
    vocab_size=97,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    feed_forward={"hidden_size": 48},
    attention={"qk_norm": "head"},
)
STEPS = 6
ROWS = 8
LENGTHS = [[32], [1, 31], [16, 16], [5, 6, 7, 14], [1] * 32, [1] * 30 + [2], [20, 12], [1] * 32]
"""Valid labels by row: 31 down to none. No cut of 8 rows into parts gives each part the same."""


@dataclass
class Run:
    """What a run did. Tensors are those of the whole model, on the CPU.

    Attributes:
        initial: digest of the weights before it.
        gradients: of its first step.
        metrics: of its steps, by name and step.
        counts: tokens that each expert got in the last step, of all ranks.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    initial: str = ""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    counts: torch.Tensor | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def bits(self) -> tuple[list[float], list[float], str]:
        """Losses, norms and weights, to the bit."""
        return self.losses, self.norms, digest(self.weights)


def build(
    strategy: str = "fsdp",
    *,
    world: World | None = None,
    model: DecoderConfig = MODEL,
    param_dtype: Any = "float32",
    sharing: dict[str, Any] | None = None,
    **options: Any,
) -> TransformerTrainModule:
    """A small train module with a warm-up, a cosine and a large rate; `sharing` of its ranks."""
    defaults: dict[str, Any] = {
        "rank_microbatch_size": 32,
        "optim": AdamWConfig(lr=1e-2),
        "scheduler": CosineWithWarmup(warmup=2),
        "dp_config": DataParallelConfig(
            name=strategy,  # type: ignore[arg-type]
            param_dtype=param_dtype,
            **(sharing or {}),
        ),
    }
    config = TransformerTrainModuleConfig(**{**defaults, **options})
    return TransformerTrainModule(config, model, seed=5, world=world)


def cut(batch: Batch, start: int, stop: int) -> Batch:
    """Rows start..stop of a batch."""
    names, length = ["input_ids", "labels", "rows"], batch.max_seqlen
    names += ["weights"] * (batch.weights is not None)
    rows = {name: getattr(batch, name)[start:stop] for name in names}
    offsets = (batch.cu_seqlens - start * length).clamp(0, (stop - start) * length).unique()
    return replace(batch, cu_seqlens=offsets, **rows)  # type: ignore[arg-type]


def micro_batches(
    step: int, rows: Sequence[int], world: World, weights: Sequence[int] = ()
) -> list[Batch]:
    """This rank's part of the global batch of `step`, cut into micro-batches of `rows` rows.

    Args:
        weights: of the labels of each row of the global batch.
    """
    everything = make_batch(
        LENGTHS, vocab_size=8, seed=step
    )  # few of 97 ids: there is much to learn
    if weights:
        by_row = torch.tensor(weights, dtype=torch.int32)[:, None]
        everything = replace(everything, weights=by_row.expand(everything.labels.shape))
    start, parts = world.reader * ROWS // world.readers, []
    for count in rows:
        parts.append(cut(everything, start, start + count))
        start += count
    assert start == (world.reader + 1) * ROWS // world.readers
    return parts


def train(
    module: TransformerTrainModule,
    rows: Sequence[int],
    steps: Sequence[int] | None = None,
    batches: Callable[[int, Sequence[int], World], list[Batch]] = micro_batches,
) -> Run:
    """Take `steps` of a run of STEPS, by default all of them, of micro-batches of `rows`."""
    run = Run(initial=weights(module))

    def look() -> None:
        named = module.model.named_parameters()
        gradients = {name: like(p.grad, p) for name, p in named if p.grad is not None}
        run.gradients = run.gradients or full(module, {"": gradients})[""]

    module.gradients_ready = look
    for step in steps or range(1, STEPS + 1):
        metrics = module.train_step(batches(step, rows, module.world), step, STEPS)
        run.losses.append(float(metrics["train/CE loss"]))
        run.norms.append(float(metrics["optim/total grad norm"]))
        run.metrics |= {f"{name} {step}": float(value) for name, value in metrics.items()}
    run.weights = whole_model(module)
    if module.experts is not None and module.config.pp_config is None:
        run.counts = module.world.sum(module.experts.counts)
    return run


def two_steps(module: TransformerTrainModule, rows: Sequence[int], **options: Any) -> Run:
    """The first steps of a run: the second one has weights and moments that the first one made."""
    return train(module, rows, (1, 2), **options)


@contextmanager
def traced_alone() -> Iterator[None]:
    """In the block what is compiled is traced, with its gradient, and run as it is.

    To make machine code of it takes minutes; that it can be made is asked of a few layouts.
    """
    plain = torch.compile

    def traced(function: Any, **options: Any) -> Any:
        options.pop("mode", None)
        return plain(function, backend="aot_eager", **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", traced)
        yield


def after_a_nan(
    module: TransformerTrainModule, layer: Any, here: bool, batches: Callable[[int], list[Batch]]
) -> dict[str, Any]:
    """A step of which one rank alone, where `here` is true, makes a NaN in a layer, and the next.

    Returns:
        "bad": whether it was left out. "unchanged": whether the weights were. "loss": of the next.
    """
    before = weights(module)
    handle = layer.register_forward_hook(
        lambda _m, _args, out: out * (float("nan") if here else 1.0)
    )
    bad = float(module.train_step(batches(1), 1, STEPS)["optim/non-finite"])
    unchanged = weights(module) == before
    handle.remove()
    good = module.train_step(batches(2), 2, STEPS)
    return {"bad": bad, "unchanged": unchanged, "loss": float(good["train/CE loss"])}


def rows_refused(module: TransformerTrainModule) -> str:
    """What is said where ranks that share a micro-batch got different rows."""
    try:
        module.train_step([make_batch(LENGTHS, vocab_size=8, seed=dist.get_rank())], 1, STEPS)
    except OlmError as error:
        return str(error)
    return ""


def watched(module: TransformerTrainModule, batches: list[Batch]) -> list[tuple[torch.Tensor, ...]]:
    """Rows, labels and losses of labels that `watch_losses` is shown of a step, by micro-batch."""
    seen: list[tuple[torch.Tensor, ...]] = []
    module.watch_losses = lambda batch, by_label: seen.append((batch.rows, batch.labels, by_label))
    module.train_step(batches, 1, STEPS)
    return seen


def lost(
    module: TransformerTrainModule, absent: int, batches: Callable[[int], list[Batch]], seconds: int
) -> str:
    """What this rank says where one, a step behind, does not come; the group is broken after it."""
    world = module.world
    others = [rank for rank in range(world.size) if rank != absent]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if world.main else None
    (port, *_) = world.gather(store.port if store else None)
    store = store or dist.TCPStore("127.0.0.1", port)
    waiting = RankWatchdog(
        replace(world, store=store), module.model, timeout=seconds, grace=timedelta(seconds=seconds)
    )
    module.train_step(batches(1), 1, STEPS)
    waiting.reached(3 if world.rank == absent else 4)
    world.barrier()
    try:
        if world.rank != absent:
            with waiting:
                module.train_step(batches(2), 2, STEPS)
        return "the step was taken"
    except RanksLostError as error:
        return str(error)
    finally:
        store.set(f"over {world.rank}", "")
        if world.main or world.rank == absent:  # rank 0 hosts the store: the last to go
            store.wait([f"over {rank}" for rank in others], timedelta(minutes=10))


def assert_alike(
    run: Run, expected: Run, which: object = None, *, rel: float = 1e-6, far: float = 1e-5
) -> None:
    """A run is that of one rank: the same bits at first, then within rounding.

    Args:
        rel: how far off losses may be. What else is said of a step may be farther off: an optimiser
            makes much of rounding.
        far: how far off gradients of the first step may be, of their largest element.
    """
    assert run.initial == expected.initial, which
    assert run.losses == pytest.approx(expected.losses, rel=rel), which
    assert run.norms[:1] == pytest.approx(expected.norms[:1], rel=1e-5), which
    assert run.gradients.keys() == expected.gradients.keys(), which
    for name, gradient in expected.gradients.items():
        worst = (run.gradients[name] - gradient).abs().max()
        assert worst <= far * gradient.abs().max(), (which, name)
    assert run.metrics.keys() == expected.metrics.keys(), which
    for name, value in expected.metrics.items():
        if "pairs" in name:  # rounded down on each rank, of each micro-batch
            assert value - 32 < run.metrics[name] <= value, (which, name)
            continue
        exact = name.startswith("train/") and value == int(value)  # counts
        near = pytest.approx(value, rel=1e-4, abs=1e-7)
        assert run.metrics[name] == (value if exact else near), (which, name)
    if run.counts is not None:
        assert expected.counts is not None
        assert torch.equal(run.counts, expected.counts), which
    for name, weight in expected.weights.items():
        if name.endswith("router.bias"):
            assert torch.equal(run.weights[name], weight), (which, name)


def save(module: TransformerTrainModule, folder: Path, step: int = 2) -> Path:
    """A checkpoint of ours in `folder`; every rank calls it."""
    OptimizerState(module.model, module.optimizer).record(module.world)
    state = module.state_dict()
    contents = Contents(step=step, kind=Kind.permanent, state=state, documents={}, lock_digest="")
    return Path(save_checkpoint(folder, contents, module.world, work_dir=folder))


def load(module: TransformerTrainModule, folder: Path, step: int = 2) -> TransformerTrainModule:
    """The module, with what was saved in `folder` in any layout; every rank calls it."""
    store = Store(folder / f"step{step:08}")
    checkpoint = Checkpoint(store, CheckpointManifest.read(store))
    make_room(module.model, module.optimizer, checkpoint.names("optim"))
    state = module.state_dict()
    checkpoint.load_tensors(state, module.world)
    module.load_state_dict(state)
    return module


def whole(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """A copy of a tensor, put together if it is sharded; every rank calls it."""
    return _together({"": {"": tensor}}, world)[""][""]


def full(module: TransformerTrainModule, given: Any = None) -> dict[str, dict[str, torch.Tensor]]:
    """A copy of the state with sharded tensors put together; every rank calls it.

    Args:
        given: tensors by part and name, in the place of the state's.
    """
    return _together(given or module.state_dict(), module.world)


def _together(state: dict[str, Any], world: World) -> dict[str, dict[str, torch.Tensor]]:
    """What all ranks have of tensors by part and name; those of a pipeline have other ones."""

    here = {
        part: {
            name: (x.shape, x.dtype, [(_bytes_of(b), b.shape, at) for b, at in local_blocks(x)])
            for name, x in of.items()
        }
        for part, of in state.items()
    }
    found: dict[str, dict[str, torch.Tensor]] = {part: {} for part in state}
    for rank in world.gather(here):
        for part, of in rank.items():
            for name, (shape, dtype, held) in of.items():
                if name not in found[part]:
                    found[part][name] = torch.full(shape, torch.nan).to(dtype)
                for block, its_shape, at in held:
                    found[part][name][at] = torch.from_numpy(block).view(dtype).view(its_shape)
    return found


def _bytes_of(tensor: torch.Tensor) -> Any:
    """As numpy has them: torch pickles each tensor as a file of its own."""
    return tensor.detach().cpu().flatten().view(torch.uint8).numpy()


def whole_model(module: TransformerTrainModule) -> dict[str, torch.Tensor]:
    """A copy of the weights, put together, and of nothing else; every rank calls it."""
    return full(module, {"model": module.state_dict()["model"]})["model"]


def weights(module: TransformerTrainModule) -> str:
    """Digest of the whole model; every rank calls it."""
    return digest(whole_model(module))


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """sha256 over names and bits."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode() + tensor.flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
