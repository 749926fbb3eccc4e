"""What a run would do, in text: configuration, mixture, schedule, size. Trains nothing."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from olm_data.mixture.lock import Lock
from olm_train.callbacks.evaluator import open_held_out
from olm_train.data.loader import DataLoader
from olm_train.flops import document_pairs, num_flops_per_token
from olm_train.run_config import RunConfig
from olm_train.trainer import run_length
from olm_train.world import World


def describe(config: RunConfig, world_size: int) -> str:
    """Return the description of a run on `world_size` ranks, made on one, without a GPU.

    Raises:
        OlmError: what the run itself would refuse at its start: sizes, lengths, missing data.
    """
    microbatch = config.train_module.rank_microbatch_size
    loader = config.data_loader.build(
        rank_microbatch_size=microbatch, world=World(rank=0, size=world_size)
    )
    with loader:
        sections = [
            "# configuration\n" + yaml.safe_dump(config.as_dict(), sort_keys=False),
            "# mixture\n" + "\n".join(_mixture(loader.lock)) + "\n",
            "# schedule\n" + "\n".join(_schedule(config, loader, world_size)) + "\n",
            "# model\n" + "\n".join(_model(config, loader)),
        ]
        held_out = list(_held_out(config, loader.lock))
    if held_out:
        sections.append("\n# evaluation\n" + "\n".join(held_out))
    return "\n".join(sections)


def _mixture(lock: Lock) -> Iterator[str]:
    yield f"lock {lock.digest[:16]}, sequence length {lock.sequence_length:,}, seed {lock.seed}"
    width = max(len(source.name) for source in lock.sources)
    for source in lock.sources:
        yield (
            f"source {source.name:<{width}}  {source.tokens:>15,} tokens  {source.rows:>12,} rows  "
            f"{source.documents:>12,} documents"
        )
    for stage, length in zip(lock.stages, lock.sequence_lengths, strict=True):
        shares = ", ".join(
            f"{source.name} {rows / stage.rows:.2%}"
            for source, rows in zip(lock.sources, stage.rows_by_source, strict=True)
        )
        parts = lock.sequence_length // length
        cut = f", each as {parts:,} of {length:,} tokens" if parts > 1 else ""
        yield f"stage {stage.name}: {stage.tokens:,} tokens, {stage.rows:,} rows{cut}: {shares}"


def _schedule(config: RunConfig, loader: DataLoader, world_size: int) -> Iterator[str]:
    trainer, module = config.trainer, config.train_module
    max_steps, stop_step = run_length(loader, trainer.max_duration, trainer.hard_stop)
    micro = loader.global_batch_size // (module.rank_microbatch_size * world_size)
    yield (
        f"{stop_step:,} steps of {loader.global_batch_size:,} tokens: "
        f"{stop_step * loader.global_batch_size:,} tokens"
    )
    yield (
        f"each step: {world_size} rank{'s' if world_size > 1 else ''} x {micro} micro-batch"
        f"{'es' if micro > 1 else ''} of {module.rank_microbatch_size:,} tokens"
    )
    phases = loader.phases()
    for phase in phases if len(phases) > 1 else []:
        rows = module.rank_microbatch_size // phase.sequence_length
        yield (
            f"steps {phase.first + 1:,} to {phase.stop:,}: sequence length "
            f"{phase.sequence_length:,}, micro-batches of {rows:,} row{'s' if rows > 1 else ''}"
        )
    if stop_step < max_steps:
        yield f"hard stop at step {stop_step:,} of {max_steps:,}"
    if loader.leftover_rows and max_steps == loader.steps:
        yield f"{loader.leftover_rows:,} rows at the end do not fill a step and are not trained on"
    size = loader.global_batch_size

    def factor(step: int) -> float:
        return module.scheduler.factor((step, max_steps), (step * size, max_steps * size))

    peak = [step for step in range(1, min(max_steps, 100_000) + 1) if factor(step) == 1.0]
    shown = {1, max_steps, *(max_steps * quarter // 4 for quarter in (1, 2, 3)), *peak[:1]}
    for step in sorted(step for step in shown if step):
        lr = module.optim.lr * factor(step)
        yield f"lr at step {step:>{len(str(max_steps))}}: {lr:.3e}"


def _model(config: RunConfig, loader: DataLoader) -> Iterator[str]:
    _, stop_step = run_length(loader, config.trainer.max_duration, config.trainer.hard_stop)
    pairs = sum(
        max(0, min(phase.stop, stop_step) - phase.first)
        * document_pairs(config.model, phase.sequence_length)
        / phase.sequence_length
        for phase in loader.phases()
    )
    flops = num_flops_per_token(config.model, pairs_per_token=pairs / stop_step)
    tokens = stop_step * loader.global_batch_size
    yield (
        f"{config.model.num_params:,} parameters, "
        f"{config.model.num_non_embedding_params:,} without embeddings"
    )
    yield (
        f"{flops:.3e} FLOPs a token, {flops * tokens:.3e} in all (documents as long as a row; "
        "shorter ones cost less)"
    )
    yield f"{tokens / config.model.num_params:.3g} tokens a parameter"
    module = config.train_module
    loss = module.loss.choose(
        config.model, microbatch=module.rank_microbatch_size, compiling=module.compile_model
    )
    yield f"attention {config.model.attention}; loss {loss.name}: {loss.why}"


def _held_out(config: RunConfig, lock: Lock) -> Iterator[str]:
    evaluator = config.trainer.callbacks.lm_evaluator
    if evaluator is not None and evaluator.enabled:
        for name, folder in evaluator.datasets.items():
            dataset = open_held_out(name, folder, lock)
            yield f"{name}: {dataset.tokens:,} tokens in {dataset.documents:,} documents"
