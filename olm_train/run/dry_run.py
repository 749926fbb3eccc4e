"""What a run would do, in text: configuration, mixture, schedule, size, memory, time, first rows.

Made on one process without a GPU: the model is built on the meta device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import yaml

from olm_data import plugins
from olm_data.counts import counted, duration
from olm_data.dataset.dataset import Dataset
from olm_data.errors import ValidationError, printable
from olm_data.mixture.lock import Lock
from olm_data.mixture.shared import warnings_of_held_out
from olm_data.printing import aligned, table
from olm_data.rows.views import LockRows
from olm_data.storage.store import is_remote
from olm_train.data.loader import DataLoader
from olm_train.distributed.threads import Processors, choose
from olm_train.distributed.world import World
from olm_train.duration import run_length
from olm_train.estimate.device_defaults import Capability, resolve
from olm_train.estimate.flops import flops_of_steps
from olm_train.estimate.gpus import GPUS, Gpu
from olm_train.estimate.layout import require_layout
from olm_train.estimate.memory import TrainingTensors, memory_of_step
from olm_train.estimate.sharding import Machine
from olm_train.estimate.traffic import traffic_of_step
from olm_train.evaluation.held_out import open_held_out
from olm_train.model.decoder import build_decoder
from olm_train.model.init import initial_std
from olm_train.optim.groups import apart
from olm_train.optim.schedule_base import Position
from olm_train.parallel.config import DTYPES
from olm_train.parallel.mesh import Mesh
from olm_train.parallel.stages import Timeline, shares, spans
from olm_train.run.config import RunConfig

SHOWN_ROWS = 2
SHOWN_DOCUMENTS = 3
SHOWN_CHARACTERS = 72


@dataclass(frozen=True, kw_only=True)
class DryRunPlan:
    """What the time and memory are planned for.

    Attributes:
        gpu: the accelerator of each rank.
        mfu: share of its peak that model FLOPs are expected to reach.
    """

    gpu: Gpu = GPUS["h100"]
    mfu: float = 0.4


def describe(
    config: RunConfig, world_size: int, plan: DryRunPlan | None = None, *, nodes: int = 1
) -> str:
    """Return the description of a run on `world_size` ranks of `nodes` machines.

    Raises:
        OlmError: what the run itself would refuse at its start: sizes, lengths, missing data.
    """
    plan = plan or DryRunPlan()
    here = [] if torch.cuda.is_available() else [_here(config)]
    config, chosen = config.on_device(plan.gpu.capability)
    config, why = config.fitted(Machine(world_size=world_size, nodes=nodes, memory=plan.gpu.memory))
    mesh = require_layout(
        config.train_module,
        build_decoder(config.model, device="meta"),
        world_size,
        nodes,
        config.micro_batches,
    )
    world = World(size=world_size, sharers=config.train_module.sharers, stages=mesh.pp)
    loader = config.loader(world)
    scheduler = config.trainer.callbacks.batch_size_scheduler
    if scheduler is not None and scheduler.enabled:
        size = config.data_loader.global_batch_size
        loader.schedule_sizes(scheduler.sizes(size, config.model.num_params))
    step = {
        "sequence_length": loader.lock.sequence_length,
        "world_size": world_size,
        "nodes": nodes,
        "micro_batches": max(config.micro_batches(loader.world_size)),
        "counted": TrainingTensors.count(config.model, config.train_module.optim),
    }
    with loader:
        trainer = config.trainer
        max_steps, stop_step = run_length(
            loader, config.model.num_params, trainer.max_duration, trainer.hard_stop
        )
        sections: dict[str, Iterable[str]] = {
            "configuration": [yaml.safe_dump(config.as_dict(), sort_keys=False).rstrip()],
            "mixture": _mixture(loader.lock),
            "schedule": _schedule(config, loader, mesh, max_steps, stop_step),
            "pipeline": _pipeline(config, loader),
            "model": _model(config, loader, world_size, plan, stop_step),
            "parametrization": _parametrization(config),
            "device": [*_chosen(chosen, plan), _threads(config), *here],
            "memory of a rank": [*_memory(config, plan, step), *why],
            "traffic of a rank": _traffic(config, step),
            "first rows": first_rows(loader.lock, loader.rows_of_step(0).tolist()),
            "evaluation": _held_out(config, loader),
        }
        texts = {name: "\n".join(lines) for name, lines in sections.items()}
    return "\n\n".join(f"# {name}\n{text}" for name, text in texts.items() if text) + "\n"


def _threads(config: RunConfig) -> str:
    """Return a line about the CPU threads of a rank, for this machine and its ranks."""
    count, why = choose(config.threads, Processors.here(), os.environ, None)
    return f"CPU threads of a rank, on this machine: {count} ({why})"


def _chosen(chosen: Mapping[str, str], plan: DryRunPlan) -> Iterator[str]:
    for what, why in chosen.items():
        yield f"auto on {plan.gpu.capability.name}: {what}: {why}"


def _here(config: RunConfig) -> str:
    """Return a line that says what `auto` would be on this machine, which has no CUDA device."""
    model, module, _ = resolve(config.model, config.train_module, Capability())
    return (
        f"here, without a CUDA device: attention {model.attention.backend}, dtype "
        f"{module.dp_config.param_dtype}, {'' if module.compile_model else 'not '}compiled"
    )


def _mixture(lock: Lock) -> Iterator[str]:
    yield f"lock {lock.digest[:16]}, sequence length {lock.sequence_length:,}, seed {lock.seed}"
    yield from table(lock.sources, "name=source", "tokens", "rows", "documents")
    for stage in lock.manifest_stages:
        shares = ", ".join(
            f"{source.name} {rows / stage.rows:.2%}"
            for source, rows in zip(lock.sources, stage.rows_by_source, strict=True)
        )
        length = stage.parts[0].sequence_length or lock.sequence_length
        parts = lock.sequence_length // length
        cut = f", each as {parts:,} of {length:,} tokens" if parts > 1 else ""
        yield f"stage {stage.name}: {stage.tokens:,} tokens, {stage.rows:,} rows{cut}: {shares}"


def _schedule(
    config: RunConfig, loader: DataLoader, mesh: Mesh, max_steps: int, stop_step: int
) -> Iterator[str]:
    module = config.train_module
    loader.check_sizes(0)
    of_one_size = list(loader.batch_sizes.of_one_size(range(stop_step)))
    sizes = ", then ".join(f"{size:,}" for _, size in of_one_size)
    seen = loader.tokens_before(stop_step)
    yield f"{counted(stop_step, 'step')} of {sizes} tokens: {seen:,} tokens"
    for steps, size in of_one_size:
        when = "each step"
        if len(of_one_size) > 1:
            when = f"steps {steps.start + 1:,} to {steps.stop:,}, {size:,} tokens each"
        micro = size // (module.rank_microbatch_size * loader.world_size)
        sharers = module.sharers
        shared = f", {mesh.pp} to the layers," if mesh.pp > 1 else ""
        shared += f"{'' if shared else ','} {sharers} to a micro-batch," if sharers > 1 else ""
        shared += f"{'' if shared else ','} matrices cut over {mesh.tp}," if mesh.tp > 1 else ""
        shared += f"{'' if shared else ','} experts dealt to {mesh.ep}," if mesh.ep > 1 else ""
        batches = f"{micro} micro-batch{'es' * (micro > 1)} of"
        yield (
            f"{when}: {counted(mesh.size, 'rank')}{shared} x {batches} "
            f"{module.rank_microbatch_size:,} tokens"
        )
    phases = loader.phases()
    for phase in phases if len(phases) > 1 else []:
        rows = module.rank_microbatch_size // phase.sequence_length
        yield (
            f"steps {phase.first + 1:,} to {phase.stop:,}: sequence length "
            f"{phase.sequence_length:,}, micro-batches of {counted(rows, 'row')}"
        )
    if stop_step < max_steps:
        yield f"hard stop at step {stop_step:,} of {max_steps:,}"
    if max_steps == loader.steps and (rest := loader.left_over()):
        yield rest
    tokens = loader.tokens_before

    def factor(step: int) -> float:
        seen, total = tokens(step), tokens(max_steps)
        position = Position(step=step, max_steps=max_steps, tokens=seen, max_tokens=total)
        return module.scheduler.factor(position)

    peak = [step for step in range(1, min(max_steps, 100_000) + 1) if factor(step) == 1.0]
    grown = {steps.start + 1 for steps, _ in of_one_size}
    shown = {1, max_steps, *grown, *(max_steps * quarter // 4 for quarter in (1, 2, 3)), *peak[:1]}
    for step in sorted(step for step in shown if step):
        growth = loader.batch_sizes.growth(step - 1)
        lr = module.optim.lr * factor(step) * module.lr_batch_scaling.factor(growth)
        yield f"lr at step {step:>{len(str(max_steps))}}: {lr:.3e}"


def _pipeline(config: RunConfig, loader: DataLoader) -> Iterator[str]:
    pipeline = config.train_module.pp_config
    if pipeline is None:
        return
    layers, parts = spans(pipeline, config.model), shares(pipeline, config.model)
    for stage, (span, share) in enumerate(zip(layers, parts, strict=True)):
        ends = "embeddings, " * (stage == 0), ", head" * (stage == pipeline.stages - 1)
        which = (
            f"layers {span.start} to {span.stop - 1}" if len(span) > 1 else f"layer {span.start}"
        )
        yield (
            f"stage {stage} on rank {pipeline.rank_of(stage)} of {pipeline.degree}: "
            f"{ends[0]}{which}{ends[1]}: {share:.1%} of the FLOPs"
        )
    micro_batches = max(config.micro_batches(loader.world_size))
    timeline = Timeline(pipeline, micro_batches)
    yield (
        f"{pipeline.schedule}, {micro_batches} micro-batches: a rank waits {timeline.bubble:.1%} "
        "of a step, where all stages take as long"
    )
    yield from timeline.picture()


def _model(
    config: RunConfig, loader: DataLoader, world_size: int, plan: DryRunPlan, stop_step: int
) -> Iterator[str]:
    tokens = loader.tokens_before(stop_step)
    flops = flops_of_steps(config.model, loader, range(stop_step)) / tokens
    yield (
        f"{config.model.num_params:,} parameters, "
        f"{config.model.num_non_embedding_params:,} without embeddings"
    )
    if config.model.num_active_params < config.model.num_params:
        yield f"{config.model.num_active_params:,} parameters that a token passes"
    yield (
        f"{flops:.3e} FLOPs a token, {flops * tokens:.3e} in all (documents as long as a row; "
        "shorter ones cost less)"
    )
    yield f"{tokens / config.model.num_params:.3g} tokens a parameter"
    for name in plugins.names("olm_train.exports"):
        yield plugins.load("olm_train.exports", name)(config.model, loader.lock)
    module = config.train_module
    loss = module.chosen_loss(config.model)
    if loader.lock.loss_weights:
        loss.require_weighing()
    yield f"attention {config.model.attention.backend}; loss {loss.name}: {loss.why}"
    if (float8 := module.float8_config) is not None:
        decoder = build_decoder(config.model, device="meta")
        yield str(float8.choose(decoder, DTYPES[module.dp_config.param_dtype]))
    rate = plan.gpu.peak_flops * plan.mfu * world_size
    seconds = flops * tokens / rate
    time = f"about {duration(seconds)}" if seconds >= 1 else "less than a second"
    yield (
        f"{time} on {world_size} x {plan.gpu.name} at {plan.mfu:.0%} of "
        f"their peak (--gpu, --mfu): {rate / flops:,.0f} tokens a second"
    )


def _parametrization(config: RunConfig) -> Iterator[str]:
    """Yield what is multiplied, and a line for each role and group of parameters."""
    model = config.model
    if model.base is None:
        return
    scaling = model.scaling
    attention = scaling.attention(model.head_size) or model.head_size**-0.5
    yield (
        f"{scaling.name}: width x {scaling.width:g}, depth x {scaling.depth:g} of the base's; "
        f"residual branches x {scaling.residual:g}, states before the head x {scaling.logits:g}, "
        f"products of queries and keys x {attention:.4g}"
    )
    decoder = build_decoder(model, device="meta")
    vectors = {name for name, parameter in decoder.named_parameters() if parameter.ndim == 1}
    rows = [["role", "tensors", "init std", "peak rate", "decay", "eps"]]
    groups = config.train_module.optim.build(decoder).param_groups
    for group, role in apart(groups, scaling.role):
        names = group["names"]
        std = "-" if names[0] in vectors else f"{initial_std(model, names[0]):.4g}"
        eps = "-" if "parts" in group else f"{group['eps']:.3g}" if "eps" in group else "-"
        rate, decay = f"{group['peak_lr']:.4g}", f"{group['weight_decay']:.4g}"
        rows.append([role, f"{len(names):,}", std, rate, decay, eps])
    yield from aligned(rows, left=(0,))


def _memory(config: RunConfig, plan: DryRunPlan, step: Mapping[str, Any]) -> Iterator[str]:
    memory = memory_of_step(config.model, config.train_module, **step)
    unit, scale = ("GB", 1e9) if memory.total >= 1e9 else ("MB", 1e6)
    sizes = {**memory.by_component(), "total": memory.total}
    rows = [[name, f"{size / scale:.4g}", unit] for name, size in sizes.items()]
    rows[-1][2] += f": {memory.total / plan.gpu.memory:.1%} of the {plan.gpu.name}'s"
    yield from aligned(rows, left=(0, 2))
    if memory.total > plan.gpu.budget:
        yield (
            f"too much: {plan.gpu.budget / 1e9:.0f} GB are left beside what the estimate does not "
            "know; lower train_module.rank_microbatch_size, compute activations twice "
            "(train_module.ac_config.mode: full), or use more ranks with dp_config.name: fsdp; "
            "olm-train presets says what fits shapes of that size"
        )


def _traffic(config: RunConfig, step: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line of what is sent in a step for each axis."""
    sent = traffic_of_step(config.model, config.train_module, **step)
    rows = [[axis, f"{amount / 1e6:,.4g}", "MB a step"] for axis, amount in sent.items()]
    context = config.train_module.cp_config
    for row in rows:
        if row[0] == "cp" and context is not None and context.exchange == "needed":
            row[2] += ", if documents are as long as rows"
    yield from aligned(rows, left=(0, 2))


def _held_out(config: RunConfig, loader: DataLoader) -> Iterator[str]:
    evaluator = config.trainer.callbacks.lm_evaluator
    if evaluator is not None and evaluator.enabled:
        held_out: dict[str, Dataset] = {}
        for name, folder in evaluator.datasets.items():
            dataset = open_held_out(name, folder, loader.lock)
            yield f"{name}: {dataset.tokens:,} tokens in {dataset.documents:,} documents"
            held_out[name] = dataset
        for text in warnings_of_held_out(held_out, loader.lock, loader.datasets):
            yield f"warning: {text}"


def first_rows(lock: Lock, rows: Sequence[int]) -> Iterator[str]:
    """Yield lines about the first few of `rows`, ids of rows of the lock's schedule.

    Remote datasets are not read, and a missing tokenizer is no reason to fail.
    """
    shown = LockRows(lock)
    for row in rows[:SHOWN_ROWS]:
        yield from _row(shown, int(row))
    if len(rows) > SHOWN_ROWS:
        yield f"... and {len(rows) - SHOWN_ROWS:,} more rows in this step"


def _row(shown: LockRows, row: int) -> Iterator[str]:
    lock = shown.lock
    place = shown.schedule.locate(np.array([row], np.int64))
    source = lock.sources[int(place.source[0])].name
    head = f"row {row}: stage {lock.stages[int(place.stage[0])].name}, source {source}"
    if is_remote(lock.location(source)):
        yield f"{head} (remote: `olm-data show row LOCK {row}` reads it)"
        return
    try:
        view = shown.view(row)
    except ValidationError as error:  # text is for people; a run needs no tokenizer
        yield f"{head} (its text cannot be shown: {error.what})"
        return
    yield f"{head}, epoch {view.epoch}, {len(view.pieces)} documents"
    for piece in view.pieces[:SHOWN_DOCUMENTS]:
        text = printable(" ".join(piece.text[:SHOWN_CHARACTERS].split()))
        more = "..." if len(piece.text) > SHOWN_CHARACTERS else ""
        yield f"    document {piece.document}, {piece.stop - piece.start:,} tokens: {text}{more}"
    if len(view.pieces) > SHOWN_DOCUMENTS:
        yield f"    ... and {len(view.pieces) - SHOWN_DOCUMENTS:,} more"
