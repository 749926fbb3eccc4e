"""The points of a ladder before they are trained: what each costs, and what all of them will tell.

    ladder.yaml, base --> sizes x lengths x rates x batches -> Rung: options of an ordinary run
                                                            -> Plan: FLOPs, hours, errors | refusal

Where the base's schedule is `wsd` in steps, the longest run of a size is the trunk of the shorter
ones: their rates are the same up to their decay, which begins from a checkpoint of the trunk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from olm_data.config.values import Values
from olm_data.errors import InputError, UsageError, suggest
from olm_data.printing import Columns, Share
from olm_train.data.loader import DataLoader
from olm_train.duration import run_length
from olm_train.estimate.flops import flops_of_steps
from olm_train.estimate.gpus import gpu_named
from olm_train.extensions.ladder.config import LadderConfig
from olm_train.extensions.ladder.design import Design
from olm_train.optim.schedule import WSD
from olm_train.run.config import RunConfig

COMMON = (
    "--trainer.work_dir=null",
    "--trainer.hard_stop=null",
    "--trainer.callbacks.lm_evaluator.eval_on_finish=true",
)
"""Options of all points."""


class Rung(msgspec.Struct, frozen=True):
    """A point to train.

    Attributes:
        name: of its folder; with another configuration it is another name.
        flops, hours: of its own steps, attention counted: those of a trunk are the trunk's.
        whole_flops: of all steps that its weights have seen.
        begins: name of its trunk; "": at the first step.
        first: step of the trunk that it goes on from.
        options: of `python -m olm_train.run`.
        digest: of its resolved configuration and the lock, wherever it begins.
    """

    name: str
    parameters: int
    tokens: int
    steps: int
    lr: float
    batch: int
    flops: float
    hours: float
    whole_flops: float
    digest: str
    options: tuple[str, ...]
    begins: str = ""
    first: int = 0


class LadderPlan(msgspec.Struct, frozen=True):
    """A ladder before it is trained.

    Attributes:
        points: in the order in which they are trained.
        alpha_error, beta_error: standard errors of the exponents, relative.
        dataset: held-out set that they are judged by.
        add: the best point to add: parameters and tokens.
    """

    COLUMNS: ClassVar = {
        "points": Columns(
            ("name", "parameters", "tokens", "steps", "flops=FLOPs", "hours", "begins=from")
        )
    }

    dataset: str
    flops: float
    hours: float
    alpha_error: Share
    beta_error: Share
    add: str
    points: list[Rung]


def plan(ladder: LadderConfig) -> LadderPlan:
    """Return the points of a ladder.

    Raises:
        InputError: its design cannot separate the exponents.
        UsageError: the base or an option is wrong, or a point does not fit into the lock.
    """
    rungs = list(_trunks_first(ladder))
    dataset = judged_by(ladder, resolved(ladder.base, rungs[0].options))
    names = {rung.name for rung in rungs}
    if len(names) < len(rungs):
        raise UsageError("two points of the ladder are the same run", where="sizes, tokens, lrs")
    shapes = sorted({(rung.parameters, rung.tokens) for rung in rungs})
    sizes, lengths = np.array(shapes, float).T
    design = Design(sizes, lengths, ladder.law, ladder.noise)
    spans = {n: [d for m, d in shapes if m == n] for n, _ in shapes}
    candidates = sorted(
        {(float(n), float(d * by)) for n in spans for d in lengths for by in (0.25, 0.5, 1, 2, 4)}
    )
    best = design.cheapest(candidates)
    add = "" if best is None else f"{best[0]:.4g} parameters x {best[1]:.4g} tokens"
    if problems := design.problems():
        raise InputError(
            "this ladder cannot separate alpha from beta: " + "; ".join(problems),
            where="sizes, tokens",
            why=f"at {ladder.noise:.2%} of noise any exponents would fit what it finds",
            fix=f"give each size several lengths of its own; first add {add}",
        )
    errors = design.errors()
    return LadderPlan(
        dataset=dataset,
        flops=sum(rung.flops for rung in rungs),
        hours=sum(rung.hours for rung in rungs),
        alpha_error=errors["alpha"],
        beta_error=errors["beta"],
        add=add,
        points=rungs,
    )


def resolved(base: str, options: tuple[str, ...]) -> RunConfig:
    """Return the configuration of a base with options."""
    values = Values.read(base)
    values.override_all(options)
    return RunConfig.resolve(values)


def judged_by(ladder: LadderConfig, config: RunConfig) -> str:
    """Return the name of the held-out set that the points are judged by."""
    sets = sets_of(config)
    if ladder.dataset is None and len(sets) == 1:
        return sets[0]
    if ladder.dataset in sets and ladder.dataset is not None:
        return ladder.dataset
    raise UsageError(
        "the points of a ladder are judged by a held-out set of the base",
        where=f"{ladder.base}: trainer.callbacks.lm_evaluator.datasets",
        fix=suggest(ladder.dataset or "", sets) if sets else "name one there",
    )


def sets_of(config: RunConfig) -> list[str]:
    """Return the names of the held-out sets of a run."""
    evaluator = config.trainer.callbacks.lm_evaluator
    return list(evaluator.datasets) if evaluator is not None and evaluator.enabled else []


def loader_of(config: RunConfig) -> DataLoader:
    """Return the data loader of a run on one rank: its steps and phases."""
    loader = config.data_loader
    return DataLoader(
        loader.mixture,
        global_batch_size=loader.global_batch_size,
        rank_microbatch_size=config.train_module.rank_microbatch_size,
        skip=loader.skip,
        verify="off",
    )


def refuse_growing(config: RunConfig, where: str) -> None:
    """Refuse a batch that grows: a law of N and D is one of equal steps."""
    scheduler = config.trainer.callbacks.batch_size_scheduler
    if scheduler is not None and scheduler.enabled:
        raise UsageError(
            "the runs of a ladder have one batch size each",
            where=f"{where}: trainer.callbacks.batch_size_scheduler",
            fix="set it to null",
        )


def _trunks_first(ladder: LadderConfig) -> Iterator[Rung]:
    base = resolved(ladder.base, ())
    lrs = ladder.lrs or [base.train_module.optim.lr]
    batches = ladder.batch_sizes or [base.data_loader.global_batch_size]
    for size, lr, batch in product(ladder.sizes, lrs, batches):
        options = tuple(f"--{name}={json.dumps(value)}" for name, value in size.items())
        options += (
            f"--train_module.optim.lr={lr!r}",
            f"--data_loader.global_batch_size={batch}",
            *COMMON,
        )
        yield from _of_size(ladder, options)


def _of_size(ladder: LadderConfig, options: tuple[str, ...]) -> list[Rung]:
    """Return the rungs of one size, rate and batch, the longest first."""
    config = resolved(ladder.base, options)
    refuse_growing(config, ladder.base)
    loader, size = loader_of(config), config.model.num_params
    lock, batch = loader.lock, loader.global_batch_size
    try:
        steps = sorted(run_length(loader, size, length, None)[0] for length in ladder.tokens)
    except UsageError as error:
        error.where = "tokens"
        raise
    schedule, trunk, starts = config.train_module.scheduler, "", dict[int, int]()
    if isinstance(schedule, WSD) and schedule.units == "steps" and schedule.warmup_fraction is None:
        warmup = schedule.warmup_length(steps[-1])
        starts = {n: n - schedule.decay_length(n, n - warmup) for n in steps[:-1] if n > warmup}
    rungs = []
    for count in reversed(steps):
        mine = (*options, f"--trainer.max_duration={{value: {count}, unit: steps}}")
        digest = digest_of(resolved(ladder.base, mine), lock.digest)
        tokens, lr = count * batch, config.train_module.optim.lr
        name = f"n{size}-d{tokens}-lr{lr:g}-b{batch}-{digest[:8]}"
        first = starts.get(count, 0)
        mine += (f"--trainer.save_folder={Path(ladder.folder) / name}",)
        if not trunk and starts:
            kept = sorted(set(starts.values()) - {0})
            mine += (f"--trainer.callbacks.checkpointer.fixed_steps={kept}",)
        if first:
            mine += (f"--trainer.load_path={Path(ladder.folder) / trunk / f'step{first:08d}'}",)
        flops = flops_of_steps(config.model, loader, range(first, count))
        rate = gpu_named(ladder.gpu).peak_flops * ladder.mfu
        rung = Rung(
            name=name,
            parameters=size,
            tokens=tokens,
            steps=count,
            lr=lr,
            batch=batch,
            flops=flops,
            hours=flops / rate / 3600,
            whole_flops=flops_of_steps(config.model, loader, range(count)),
            digest=digest,
            options=mine,
            begins=trunk if first else "",
            first=first,
        )
        rungs.append(rung)
        trunk = trunk or name
    return rungs


def digest_of(config: RunConfig, mixture: object) -> str:
    """Return the digest of what a point comes to: its configuration without its folder."""
    content = config.as_dict()
    for name in ("save_folder", "work_dir"):
        content["trainer"].pop(name, None)
    content["data_loader"]["mixture"] = mixture
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
