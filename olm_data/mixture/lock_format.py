"""The keys of `mixture.lock.json`, and which values fit each other.

mixture.lock.json --bounded_json--> LockFile --is_consistent--> Lock (lock.py)

Numbers, names and exact fractions are bounded here, before anything is made from them: a lock may
come from elsewhere, and its digest says only that nobody changed it since.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Annotated

import msgspec

from olm_data.bounded_json import JsonObject, Size, Sparse
from olm_data.counts import MAX_COUNT, MAX_SEQUENCE_LENGTH
from olm_data.dataset.tokenizer import TokenizerRules
from olm_data.dataset.view import ViewInfo
from olm_data.decoding import convert
from olm_data.order.base import Order
from olm_data.order.orders import DEFAULT, orders_at
from olm_data.order.slots import MAX_BLOCK
from olm_data.packing.base import Packing
from olm_data.packing.concat import rows_in, unused_tail
from olm_data.packing.row_plan import FILES, PlanInfo
from olm_data.storage.names import acts, is_mixture_name

Seed = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

_EXACT = re.compile(r"[0-9]{1,400}(?:/(?!0+\Z)[0-9]{1,400})?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_REST = ".rest"
_MAX_TEXT = 1 << 16  # characters of a condition

LOSS_UNITS, MAX_LOSS_WEIGHT = 1000, 1000
"""Parts of 1 that the loss weight of a source is counted in; the largest there is."""


class Likeness(Sparse, frozen=True, kw_only=True):
    """How a source is like that of another lock, "there" (`mix --like`).

    A document is counted as often as it is drawn.

    Attributes:
        lock: digest of the other lock.
        documents: drawn, those of the other lock in its order; each is whole, but for `cut_here`.
        tokens, tokens_there: of these documents, here and there.
        rows_there: of the source, that the other lock draws.
        whole_here: documents of which the other lock draws the first tokens and not all.
        not_here: documents of which it draws some tokens and not the first.
        cut_here: the last ones, whose tokens fill no row.
    """

    lock: str
    documents: Size
    tokens: Size
    tokens_there: Size
    rows_there: Size
    whole_here: Size = 0
    not_here: Size = 0
    cut_here: Size = 0


class LockSource(Sparse, frozen=True, kw_only=True):
    """One source; `dataset` is the dataset's digest, `max_epochs` an exact "n/d".

    `plan` is what the row plan must be where the packing or a view needs one, else None. `view` is
    what is drawn on, None for all documents; `tokens`, `documents` and `trained` are the whole
    dataset's. `trained` counts the tokens that are trained; None: all are. What the loss of one is
    multiplied by is `loss_weight`, an exact "n/d"; None: by 1. `like` is of a lock that
    `mix --like` made: its rows are drawn once, however often they hold a document.
    """

    name: str
    dataset: str
    tokens: Size
    documents: Size
    rows: Size
    dtype: str
    max_documents_per_row: Size
    max_epochs: str
    plan: PlanInfo | None = None
    view: ViewInfo | None = None
    trained: Size | None = None
    loss_weight: str | None = None
    like: Likeness | None = None

    @property
    def trained_share(self) -> float:
        """Share of its dataset's tokens that is trained."""
        return 1.0 if self.trained is None else self.trained / self.tokens

    def epochs(self, rows: int) -> float:
        """Return how often its documents are seen in `rows` of its rows, in the mean."""
        often = self.like.documents / self.view.documents if self.like and self.view else 1
        return rows / self.rows * often

    @property
    def tokens_kept(self) -> int:
        """Tokens of the documents that are drawn on."""
        return self.tokens if self.view is None else self.view.tokens

    def tokens_in_no_row(self, sequence_length: int) -> int:
        """Return how many of its tokens stand in no row of the lock's sequence length."""
        return unused_tail(self.tokens, sequence_length) if self.plan is None else self.plan.dropped

    def padding(self, sequence_length: int) -> float:
        """Return the share of the inputs of its rows that are padding."""
        return 0 if self.plan is None else 1 - self.plan.tokens / (self.rows * sequence_length)


class LockStage(Sparse, frozen=True, kw_only=True):
    """One stage; lists are in the order of the lock's sources, `wanted` holds exact "n/d".

    `rows` are rows of the lock's sequence length; `sequence_length` is the shorter one they are cut
    into, None where they stay whole. A stage of the manifest with exact numbers of rows may take
    several; `wanted` is the share of all of them together, of the steps of a ramp each one's own.

    Attributes:
        label: its name in the file: NAME, NAME.rest, NAME.rest.rest for the parts of a stage; NAME,
            NAME.2, NAME.3 for the steps of a ramp.
        part_of: of a part after the first, name of the stage of the manifest.
        epochs: "n/d" of each source, where the manifest asked for epochs.
        max_epochs: source -> "n/d", how often this stage alone may go through it.
        capped: sources that give less than was wanted, for want of rows.
        groups: group -> its members, sources or groups.
        weights_file: `name` and `sha256` of the file that the weights came from.
    """

    label: str = msgspec.field(name="name")
    rows: Size
    tokens: Size
    block: Size
    counts: tuple[Size, ...]
    wanted: tuple[str, ...]
    rows_by_source: tuple[Size, ...]
    sequence_length: Size | None = None
    part_of: str | None = None
    epochs: tuple[str, ...] = ()
    max_epochs: dict[str, str] = msgspec.field(default_factory=dict)
    capped: tuple[str, ...] = ()
    groups: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    weights_file: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.part_of is not None and not (
            self.part
            and self.label in {part_label(self.name, self.part, step) for step in (False, True)}
        ):
            raise ValueError("a part of a stage has another name than its stage")

    @property
    def name(self) -> str:
        """Name of the stage of the manifest."""
        return self.label if self.part_of is None else self.part_of

    @property
    def part(self) -> int:
        """Which part of that stage this is, from 0."""
        behind = self.label[len(self.name) :]
        return int(behind[1:]) - 1 if behind[1:].isdecimal() else len(behind) // len(_REST)


class OlderLock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An older lock whose first rows are those of this lock.

    Attributes:
        digest: of the older lock.
        rows: how many are the same; all of it, or up to where a revision begins.
        order_sha256: `schedule_sha256` of `sample_rows(rows)`, the same in both locks.
    """

    digest: str
    rows: Size
    order_sha256: str


class LockFile(Sparse, frozen=True, kw_only=True):
    """The keys of `mixture.lock.json`; one with a default is left out where it is not used.

    Beside them stand `packing`, its name; `order`, which is the version of the schedule; and the
    order of the rows under a key of its own (`orders.lock_key`).
    """

    format: str
    version: int
    seed: Seed
    sequence_length: Size
    tokenizer: TokenizerRules
    sources: tuple[LockSource, ...]
    stages: tuple[LockStage, ...]
    locations: dict[str, str]
    tools: dict[str, str]
    digest: str
    extends: tuple[OlderLock, ...] = ()

    @property
    def loss_weights(self) -> tuple[int, ...]:
        """What the loss of a token of each source counts, in whole numbers; () where all alike."""
        units = [int(Fraction(source.loss_weight or 1) * LOSS_UNITS) for source in self.sources]
        return tuple(u // math.gcd(*units) for u in units) if len(set(units)) > 1 else ()

    @property
    def manifest_stages(self) -> list[ManifestStage]:
        """The stages of the manifest, their parts together, in the order of the run."""
        found: list[list[LockStage]] = []
        for stage in self.stages:
            if not stage.part:
                found.append([])
            found[-1].append(stage)
        return [ManifestStage(tuple(parts)) for parts in found]


def part_label(stage: str, part: int, step: bool = False) -> str:
    """Return the label of part `part`, from 0, of a stage of the manifest; `step`: of a ramp."""
    return f"{stage}.{part + 1}" if step and part else stage + _REST * part


@dataclass(frozen=True)
class ManifestStage:
    """One stage of the manifest; `parts` are its stages in the lock, most often one."""

    parts: tuple[LockStage, ...]

    @property
    def name(self) -> str:
        """Name in the manifest."""
        return self.parts[0].name

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def tokens(self) -> int:
        """Tokens of all parts, as the manifest says them."""
        return sum(part.tokens for part in self.parts)

    @cached_property
    def rows_by_source(self) -> tuple[int, ...]:
        """Rows of each source, in the order of the lock's sources."""
        return tuple(map(sum, zip(*(part.rows_by_source for part in self.parts), strict=True)))

    @cached_property
    def wanted(self) -> tuple[Fraction, ...]:
        """The share asked for of each source; of a ramp the mean."""
        if len({part.wanted for part in self.parts}) == 1:
            return tuple(map(Fraction, self.parts[0].wanted))
        amounts = [[part.rows * Fraction(w) for w in part.wanted] for part in self.parts]
        return tuple(sum(own, Fraction(0)) / self.rows for own in zip(*amounts, strict=True))

    @property
    def exact(self) -> bool:
        """Whether the stage is a number of rows of each source: by epochs, capped, or a ramp."""
        return bool(self.parts[0].epochs or self.parts[0].capped or len(self.parts) > 1)

    def compiled(self, index: int) -> Fraction:
        """Return the share that a source has in the long run of the stage."""
        if self.exact:
            return Fraction(self.rows_by_source[index], self.rows)
        return Fraction(self.parts[0].counts[index], self.parts[0].block)


def take_order(content: JsonObject) -> Order:
    """Return the order of a lock, and take its key out of the file's content."""
    found = orders_at(content.keys() - {"order", "packing", *LockFile.__struct_fields__})
    if len(found) > 1:
        names = ", ".join(sorted(order.name for order in found.values()))
        raise msgspec.ValidationError(f"a lock has one order, not {names}")
    for key, order in found.items():
        return convert(content.pop(key), order)
    return DEFAULT()


def is_consistent(lock: LockFile, order: Order, packing: Packing) -> bool:
    """Whether the numbers fit each other, as they do in every lock that `MixPlan.compile` makes."""
    names = [source.name for source in lock.sources]
    return (
        _texts_fit(lock)
        and set(lock.locations) == set(names)
        and len(set(names)) == len(names) > 0
        and 0 < lock.sequence_length <= MAX_SEQUENCE_LENGTH
        and sum(stage.rows for stage in lock.stages) <= MAX_COUNT
        and all(s.view is not None and s.view.documents > 0 for s in lock.sources if s.like)
        and all(s.max_documents_per_row <= lock.sequence_length + 1 for s in lock.sources)
        and order.fits([s.rows for s in lock.sources])
        and all(
            (s.plan is not None) == (packing.planned or s.view is not None) for s in lock.sources
        )
        and all(
            s.rows == (s.plan.rows if s.plan else rows_in(s.tokens, lock.sequence_length)) > 0
            for s in lock.sources
        )
        and all(
            not stage.part or (stage.name, stage.part - 1) == (before.name, before.part)
            for before, stage in pairwise((*lock.stages[:1], *lock.stages))
        )
        and all(
            len(stage.counts) == len(stage.wanted) == len(stage.rows_by_source) == len(names)
            and min(stage.counts) >= 0
            and min(stage.rows_by_source) >= 0
            and 0 < sum(stage.counts) == stage.block <= MAX_BLOCK
            and sum(stage.rows_by_source) == stage.rows
            and (
                stage.sequence_length is None
                or (
                    0 < stage.sequence_length < lock.sequence_length
                    and lock.sequence_length % stage.sequence_length == 0
                )
            )
            for stage in lock.stages
        )
    )


def strange_name(lock: LockFile) -> str | None:
    """Return a name of a source, stage or group that no manifest can lead to, None without one."""
    names = [source.name for source in lock.sources]
    for stage in lock.stages:
        names += [stage.label, *stage.groups, *(m for g in stage.groups.values() for m in g)]
        names += [*stage.max_epochs, *stage.capped]
    return next((name for name in names if not is_mixture_name(name)), None)


def is_loss_weight(weight: Fraction) -> bool:
    """Whether a source may have this loss weight: some whole numbers are in proportion to all."""
    return 0 < weight <= MAX_LOSS_WEIGHT and (weight * LOSS_UNITS).denominator == 1


def _texts_fit(lock: LockFile) -> bool:
    """Whether all fractions, digests and other texts are such as a manifest can lead to."""
    exact, digests, plain = list[str](), [lock.tokenizer.sha256], list[str]()
    for stage in lock.stages:
        exact += [*stage.wanted, *stage.epochs, *stage.max_epochs.values()]
        plain += [text for item in stage.weights_file.items() for text in item]
    for source in lock.sources:
        exact += [source.max_epochs, source.loss_weight or "1"]
        digests += [source.dataset, *([source.like.lock] if source.like else [])]
        if source.plan is not None:
            digests += source.plan.sha256.values()
            if source.plan.sha256.keys() != FILES.keys():
                return False
        if source.view is not None:
            plain += [source.view.where or "", source.view.exclude_ids or ""]
    digests += [older.digest for older in lock.extends]
    return (
        all(map(_EXACT.fullmatch, exact))
        and all(is_loss_weight(Fraction(source.loss_weight or 1)) for source in lock.sources)
        and all(map(_DIGEST.fullmatch, digests))
        and not any(acts(text) or len(text) > _MAX_TEXT for text in plain)
    )
