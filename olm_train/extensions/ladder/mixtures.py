"""The runs of a mixture search: which mixtures are trained, and what each found.

    mix-search.yaml, manifest --> sizes of its sources, caps -> Region -> points (simplex.py)
    point --> FOLDER/mixtures/NAME.yaml --olm-data mix--> lock -> an ordinary run -> mixtures.jsonl

A point is known by its digest: of the run's configuration and of the sources that it draws on, with
their shares. A source more leaves the points there are as they are: its share in them is 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
import numpy as np
import yaml
from msgspec import Meta

from olm_data.config.convert import Config, parse
from olm_data.config.hints import (
    Count,
    FilePath,
    LocalPath,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Proportion,
)
from olm_data.config.values import Values
from olm_data.errors import InputError, UsageError, ValidationError, suggest
from olm_data.mixture.lock import Lock
from olm_data.mixture.manifest import Mixture, mixture_of
from olm_data.mixture.mix import mix, read_or_compile
from olm_data.order.steps import StepSizes
from olm_data.printing import Columns, Loss
from olm_data.run_log.lines import read_lines, replace_file
from olm_train.duration import Duration
from olm_train.estimate.flops import document_pairs, num_flops_per_token
from olm_train.extensions.ladder.config import refuse_units
from olm_train.extensions.ladder.law import Floats
from olm_train.extensions.ladder.plan import COMMON, digest_of, refuse_growing, resolved, sets_of
from olm_train.extensions.ladder.run import LadderRun, LadderRuns, losses
from olm_train.extensions.ladder.simplex import PARTS, Region, unlike
from olm_train.run.config import RunConfig

RESULTS = "mixtures.jsonl"
Bounds = Annotated[list[Proportion], Meta(min_length=2, max_length=2)]


@dataclass(frozen=True, kw_only=True)
class SearchConfig(Config):
    """A search for the shares of sources: one run for each of several mixtures.

    Attributes:
        base: train.yaml of all runs; its lock gives way to that of each mixture.
        manifest: of the mixture; its sources are mixed, its stages and groups give way.
        folder: where the runs are trained, and what they found.
        tokens: length of each run, in `tokens` or `chinchilla`.
        target: tokens of the run that the mixture is for: no source may be drawn there more often
            than its `max_epochs`.
        points: mixtures, with the natural and the uniform one.
        datasets: held-out sets of the base's `lm_evaluator` whose losses count, and how much;
            default: all of them alike.
        bounds: of sources, the least and the largest share.
        seed: of the mixtures that are drawn.
    """

    base: FilePath
    manifest: FilePath
    folder: LocalPath
    tokens: Duration
    target: Count
    points: PositiveInt = 32
    datasets: dict[str, PositiveFloat] = field(default_factory=dict)
    bounds: dict[str, Bounds] = field(default_factory=dict)
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_units(self.tokens)

    @property
    def options(self) -> tuple[str, ...]:
        """What is the same in all runs."""
        length = f"{{value: {self.tokens.value}, unit: {self.tokens.unit}}}"
        return (*COMMON, f"--trainer.max_duration={length}")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SearchConfig:
        """Read a mix-search.yaml.

        Raises:
            UsageError: it cannot be read, or a field is unknown, missing or of the wrong type.
        """
        return parse(cls, Values.read(path, example="mix-search.yaml"))


class MixedPoint(msgspec.Struct, frozen=True):
    """A mixture that was trained: a line of mixtures.jsonl.

    Attributes:
        shares: by source, above 0.
        losses: by held-out set, at the end of the run, in nats a token.
    """

    name: str
    digest: str
    shares: dict[str, float]
    losses: dict[str, Annotated[Loss, Meta(gt=0)]]


class Proxy(msgspec.Struct, frozen=True):
    """A mixture to train."""

    name: str
    digest: str
    shares: dict[str, float]
    trained: bool


class SearchPlan(msgspec.Struct, frozen=True):
    """The runs of a search.

    Attributes:
        tokens: of each.
        flops: of those that are not trained yet.
    """

    COLUMNS: ClassVar = {"points": Columns(("name", "shares", "trained"))}

    sources: int
    tokens: int
    flops: float
    datasets: dict[str, float]
    points: list[Proxy]


@dataclass(frozen=True)
class Search:
    """A search whose files are open.

    Attributes:
        mixture: the manifest; `lock` is what it compiles to.
        run: the base's configuration.
    """

    config: SearchConfig
    mixture: Mixture
    lock: Lock
    run: RunConfig

    @classmethod
    def open(cls, config: SearchConfig) -> Search:
        """Read what a search names.

        Raises:
            UsageError: the base or the manifest is wrong.
        """
        values = Values.read(config.manifest, numbers="exact", digits_only=True)
        run = resolved(config.base, config.options)
        refuse_growing(run, config.base)
        return cls(config, mixture_of(values), read_or_compile(config.manifest), run)

    @property
    def names(self) -> list[str]:
        """Of the sources, in the order of all arrays."""
        return [source.name for source in self.lock.sources]

    @cached_property
    def available(self) -> Floats:
        """Tokens of each source that are in rows."""
        return np.array([s.rows * self.lock.sequence_length for s in self.lock.sources], float)

    @cached_property
    def steps(self) -> int:
        """Steps of each run."""
        sizes = StepSizes.constant(self.run.data_loader.global_batch_size)
        size = self.run.model.num_params
        return self.config.tokens.to_steps(batch_sizes=sizes, steps_per_epoch=0, num_params=size)

    @property
    def tokens(self) -> int:
        """Tokens of each run."""
        return self.steps * self.run.data_loader.global_batch_size

    @cached_property
    def weights(self) -> dict[str, float]:
        """Held-out sets and their weights, which sum to 1."""
        there = sets_of(self.run)
        wanted = self.config.datasets or dict.fromkeys(there, 1.0)
        for name in wanted if there else [""]:
            if name not in there:
                raise UsageError(
                    "mixtures are judged by held-out sets of the base",
                    where=f"{self.config.base}: trainer.callbacks.lm_evaluator.datasets",
                    fix=suggest(name, there) if there else "name one there",
                )
        total = sum(wanted.values())
        return {name: weight / total for name, weight in wanted.items()}

    @cached_property
    def region(self) -> Region:
        """The mixtures that bounds and `max_epochs` allow.

        Raises:
            UsageError, InputError: there are none.
        """
        names, bounds = self.names, self.config.bounds
        for name, (least, most) in bounds.items():
            if name not in names or least > most:
                raise UsageError(
                    f"{name}: [{least:g}, {most:g}] are no bounds of a source's share",
                    where="bounds",
                    fix=suggest(name, names) if name not in names else "give the least one first",
                )
        low, high = np.array([bounds.get(name, [0, 1]) for name in names]).T
        caps = np.array([float(source.max_epochs) for source in self.mixture.sources])
        needed = max(self.config.target, self.tokens)
        high = np.minimum(high, caps * self.available / needed)
        least, most = np.ceil(low * PARTS - 1e-6), np.floor(high * PARTS + 1e-6)
        if least.sum() > PARTS or most.sum() < PARTS or (most < least).any():
            shares = zip(names, low, high, strict=True)
            raise InputError(
                f"no mixture of {needed:,} tokens keeps all bounds and max_epochs: "
                + ", ".join(f"{name} {a:.3f} to {b:.3f}" for name, a, b in shares),
                where=self.config.manifest,
                fix="lower target, raise max_epochs, or widen bounds",
            )
        return Region(self.available / self.available.sum(), low, high)

    def done(self) -> list[MixedPoint]:
        """Return the points that were trained as they would be now."""
        there = read_lines(Path(self.config.folder) / RESULTS, MixedPoint)
        return [
            point
            for point in {point.digest: point for point in there}.values()
            if point.shares.keys() <= {*self.names}
            and self.weights.keys() <= point.losses.keys()
            and point.digest == self.digest(point.shares)
        ]

    def array(self, shares: Mapping[str, float]) -> Floats:
        """Return shares as numbers [sources]."""
        return np.array([shares.get(name, 0.0) for name in self.names])

    def named(self, shares: Floats) -> dict[str, float]:
        """Return the shares above 0 by source."""
        return {n: float(s) for n, s in zip(self.names, shares, strict=True) if s}

    def digest(self, shares: Mapping[str, float]) -> str:
        """Return the digest of what a mixture is trained as."""
        lock = self.lock
        sources = {
            s.name: [shares[s.name], msgspec.to_builtins(s) | {"max_epochs": ""}]
            for s in lock.sources
            if s.name in shares
        }
        rows = [lock.seed, lock.sequence_length, lock.packing.name, lock.order.name]
        return digest_of(self.run, {"rows": rows, "sources": sources})

    def plan(self) -> SearchPlan:
        """Return the points: baselines, those there are, and others far from them.

        Raises:
            UsageError: they are too few to fit the shares.
        """
        least = len(self.names) + 3
        if self.config.points < least:
            raise UsageError(
                f"{self.config.points} mixtures do not tell what {len(self.names)} shares do",
                where="points",
                fix=f"train {least} at least, better {4 * len(self.names) + 4}",
            )
        done = {point.digest: self.array(point.shares) for point in self.done()}
        points = np.vstack([self.region.baselines(), *done.values()])
        shares = self.region.spread(points[unlike(points)], self.config.points, self.config.seed)
        proxies = [
            Proxy(f"m{digest[:8]}", digest, named, digest in done)
            for named in map(self.named, shares)
            for digest in [self.digest(named)]
        ]
        left = sum(not proxy.trained for proxy in proxies)
        pairs = document_pairs(self.run.model, self.lock.sequence_length)
        each = num_flops_per_token(
            self.run.model, pairs_per_token=pairs / self.lock.sequence_length
        )
        return SearchPlan(
            sources=len(self.names),
            tokens=self.tokens,
            flops=each * self.tokens * left,
            datasets=self.weights,
            points=proxies,
        )

    def manifest(self, shares: Mapping[str, float], tokens: int) -> bytes:
        """Return the manifest of a mixture: one stage."""
        data = dict(Values.read(self.config.manifest).data)
        for key in ("groups", "on_exhausted"):
            data.pop(key, None)
        data["sources"] = {
            name: keys | {k: self.mixture.resolve(keys[k]) for k in PATHS if k in keys}
            for name, keys in data["sources"].items()
            if name in shares
        }
        parts = {name: round(share * PARTS) for name, share in shares.items()}
        data["stages"] = [{"name": "main", "tokens": tokens, "weights": parts}]
        text: str = yaml.safe_dump(data, sort_keys=False)
        return text.encode()

    def batch(self, plan: SearchPlan) -> LadderRuns:
        """Return the mixtures that are not trained yet, each mixed right before its run."""
        folder = Path(self.config.folder)
        tasks = []
        for proxy in (proxy for proxy in plan.points if not proxy.trained):
            lock = folder / "mixtures" / f"{proxy.name}.lock.json"
            options = (
                *self.config.options,
                f"--data_loader.mixture={os.path.abspath(lock)}",
                f"--trainer.save_folder={folder / proxy.name}",
            )
            found, prepare = partial(self._point_of, proxy), partial(self._mix, proxy, lock)
            tasks.append(LadderRun(name=proxy.name, options=options, found=found, prepare=prepare))
        return LadderRuns(base=self.config.base, results=folder / RESULTS, tasks=tasks)

    def _mix(self, proxy: Proxy, lock: Path) -> None:
        manifest = lock.with_name(f"{proxy.name}.yaml")
        manifest.parent.mkdir(parents=True, exist_ok=True)
        replace_file(manifest, self.manifest(proxy.shares, self.tokens))
        mix(str(manifest), str(lock), overwrite=True)

    def _point_of(self, proxy: Proxy) -> MixedPoint:
        place = Path(self.config.folder) / proxy.name
        found = {name: losses(place, name).get(self.steps) for name in sets_of(self.run)}
        known = {name: loss for name, loss in found.items() if loss is not None}
        if missing := self.weights.keys() - known.keys():
            raise ValidationError(
                f"the run has no loss of {min(missing)} at step {self.steps:,}", where=str(place)
            )
        return MixedPoint(proxy.name, proxy.digest, proxy.shares, known)


PATHS = ("data", "exclude_ids")
"""Keys of a source that count from the manifest's folder."""
