"""Stages of a mixture manifest, read into exact values.

`groups`, `stages` of the manifest --read_stages--> StageSpec, one a stage
weights_file -----------------------^

Also: groups of sources: a tree of exact shares, and what fits when some sources hold too little.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any

from msgspec import Meta

from olm_data.config.convert import parse
from olm_data.config.hints import Count, Needs, ReadBy
from olm_data.config.strict_yaml import MAX_BYTES
from olm_data.config.values import KeyPath, Values
from olm_data.counts import MAX_COUNT, MAX_SEQUENCE_LENGTH
from olm_data.errors import InputError, UsageError, printable, quoted, suggest
from olm_data.order.slots import normalise
from olm_data.path_kinds import nearest
from olm_data.regular_files import open_regular

Groups = Mapping[str, Mapping[str, Fraction]]


class GroupError(ValueError):
    """Groups that are no tree; `group` and `member` are the names it is wrong at."""

    def __init__(self, what: str, group: str, member: str) -> None:
        self.what, self.group, self.member = what, group, member
        super().__init__(what)


@dataclass(frozen=True)
class Share:
    """A source, or a group with its members.

    Attributes:
        name: of the source or group.
        share: of the whole stage; the members' shares sum to their group's.
        members: empty for a source.
    """

    name: str
    share: Fraction
    members: tuple[Share, ...] = ()


def sources_of(name: str, groups: Groups, inside: tuple[str, ...] = ()) -> list[str]:
    """Return the sources below a source or group, in order.

    Raises:
        GroupError: a group contains itself, or reaches a source twice.
    """
    if name in inside:
        way = " > ".join((*filter(None, inside), name))
        raise GroupError(f"group {name!r} contains itself: {way}", inside[-1], name)
    if name not in groups:
        return [name]
    found: list[str] = []
    for member in groups[name]:
        for source in sources_of(member, groups, (*inside, name)):
            if source in found:
                raise GroupError(f"source {source!r} is reached twice", name, member)
            found.append(source)
    return found


def expand(
    weights: Mapping[str, Fraction], groups: Groups, whole: Fraction = Fraction(1)
) -> tuple[Share, ...]:
    """Return the tree of the weighted sources and groups; the shares of its top sum to `whole`."""
    parts = normalise(list(weights.values())) if weights else ()
    return tuple(
        Share(name, part * whole, expand(groups.get(name, {}), groups, part * whole))
        for name, part in zip(weights, parts, strict=True)
    )


def leaves(tree: Sequence[Share]) -> dict[str, Fraction]:
    """Return the share of each source of a tree."""
    found: dict[str, Fraction] = {}
    for node in tree:
        found |= leaves(node.members) if node.members else {node.name: node.share}
    return found


def members(tree: Sequence[Share]) -> dict[str, tuple[str, ...]]:
    """Return the names of the members of each group of a tree."""
    found: dict[str, tuple[str, ...]] = {}
    for node in tree:
        if node.members:
            found[node.name] = tuple(member.name for member in node.members)
            found |= members(node.members)
    return found


def fill(tree: Sequence[Share], limits: Mapping[str, int], total: Fraction) -> dict[str, Fraction]:
    """Divide `total` by the shares, no source above its limit.

    What a source cannot give is given by the other members of its group, in proportion to their
    shares; what a group cannot give, by the group's neighbours in the same way.

    Args:
        tree: a share of 0 gives nothing, whatever is missing.
        limits: of each source.
        total: at most what `capacity` says.

    Raises:
        ValueError: the sources together hold less than `total`.
    """
    holds = [capacity(node, limits) for node in tree]
    amounts = water_fill([node.share for node in tree], holds, total)
    found: dict[str, Fraction] = {}
    for node, amount in zip(tree, amounts, strict=True):
        found |= fill(node.members, limits, amount) if node.members else {node.name: amount}
    return found


def capacity(node: Share, limits: Mapping[str, int]) -> int:
    """Return how much a node can give at most: the limits of its sources with a share."""
    if not node.share:
        return 0
    if not node.members:
        return limits[node.name]
    return sum(capacity(member, limits) for member in node.members)


def water_fill(
    weights: Sequence[Fraction], limits: Sequence[int], total: Fraction
) -> list[Fraction]:
    """Divide `total` in proportion to the weights, none above its limit.

    Raises:
        ValueError: the limits of the positive weights sum to less than `total`.
    """
    amounts = [Fraction(0)] * len(weights)
    open_ = [i for i, weight in enumerate(weights) if weight]
    if sum(limits[i] for i in open_) < total:
        raise ValueError("the limits sum to less than what is to be divided")
    while open_:
        scale = total / sum(weights[i] for i in open_)
        full = [i for i in open_ if weights[i] * scale > limits[i]]
        for i in full or open_:
            amounts[i] = Fraction(limits[i]) if full else weights[i] * scale
        if not full:
            break
        total -= sum(limits[i] for i in full)
        open_ = [i for i in open_ if i not in full]
    return amounts


WAYS = ("weights", "weights_file", "tokens_from", "epochs")

SequenceLength = Annotated[int, Meta(ge=1, le=MAX_SEQUENCE_LENGTH)]
Weights = Annotated[dict[str, Annotated[Fraction, Meta(ge=0)]], Meta(min_length=1)]
"""A share of each source or group, of any sum."""
Epochs = Annotated[dict[str, Annotated[Fraction, Meta(gt=0)]], Meta(min_length=1)]
"""How often the rows of each source are drawn."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def name_of(kind: str) -> ReadBy:
    """Return the annotation of the name of a source, stage or group (`kind`)."""

    def read(name: Any) -> str:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                f"{quoted(name)} is not a {kind} name",
                fix="use up to 64 letters, digits, `.`, `_` and `-`, a letter or digit first",
            )
        return name

    return ReadBy(read, f"a {kind} name", {"type": "string", "pattern": f"^{_NAME.pattern}$"})


def _file_name(name: Any) -> str:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise UsageError(
            f"{quoted(name)} is not the path of a file",
            fix="write the YAML or JSON file with the weights: weights_file: ./weights.json",
        )
    return name


@dataclass(frozen=True, kw_only=True)
class StageKeys:
    """One stage as it is written; it has one of weights, weights_file, tokens_from and epochs.

    Attributes:
        name: unique in the mixture.
        tokens: its length.
        weights: shares of sources and groups.
        weights_to: the shares at the stage's end; they go there in a straight line.
        weights_file: file with them, YAML or JSON.
        tokens_from: tokens of each source or group.
        epochs: how often each source is gone through; the sizes of the sources are its length.
        max_epochs: how often the rows of a source may be drawn in this stage.
        sequence_length: of its rows, a divisor of the mixture's.
    """

    name: Annotated[str, name_of("stage")]
    tokens: Count | None = None
    weights: Weights | None = None
    weights_to: Annotated[Weights | None, Needs("weights", "weights_file")] = None
    weights_file: Annotated[str, ReadBy(_file_name, "a path", {"type": "string"})] | None = None
    tokens_from: Annotated[dict[str, Count], Meta(min_length=1)] | None = None
    epochs: Epochs | None = None
    max_epochs: Epochs | None = None
    sequence_length: SequenceLength | None = None


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage, as asked for.

    Attributes:
        name: unique in the mixture.
        tokens: its length; 0 with `epochs`, where the sizes of the sources decide.
        tree: the weighted sources and groups, empty with `epochs`.
        epochs: how often each source is gone through, empty unless the stage says so.
        max_epochs: how often the rows of a source may be drawn in this stage, where it says so.
        weights_file: name and sha256 of the file that the weights come from, or None.
        sequence_length: what its rows are cut into, None where they stay whole.
        tree_to: as `tree`, at the end of a stage whose weights ramp; else empty.
    """

    name: str
    tokens: int
    tree: tuple[Share, ...]
    epochs: Mapping[str, Fraction]
    max_epochs: Mapping[str, Fraction]
    weights_file: tuple[str, str] | None
    sequence_length: int | None = None
    tree_to: tuple[Share, ...] = ()

    @property
    def shares(self) -> dict[str, Fraction]:
        """The exact share of each weighted source; they sum to 1."""
        return leaves(self.tree)


@dataclass(frozen=True)
class _Context:
    """What stages are read against: where they stand, sources and groups by name."""

    values: Values
    sources: Sequence[str]
    groups: Groups

    def refuse(self, path: KeyPath, members: Mapping[str, Any]) -> None:
        """Refuse members, found at `path`, that are unknown or lead to a source twice."""
        known = [*self.sources, *self.groups]
        for name in members:
            if name not in known:
                raise UsageError(
                    f"there is no source {printable(name)!r}",
                    where=self.values.where((*path, name)),
                    fix=suggest(name, known),
                )
        try:
            sources_of("", {**self.groups, "": members})
        except GroupError as error:
            place = ("groups", error.group) if error.group else path
            raise UsageError(
                error.what,
                where=self.values.where((*place, error.member)),
                fix=f"remove {error.member!r} here, or from the other place",
            ) from None


def read_stages(
    values: Values,
    stages: Sequence[StageKeys],
    sequence_length: int,
    sources: Sequence[str],
    groups: Groups,
) -> tuple[StageSpec, ...]:
    """Return the stages of a manifest, in the order of the run, once its groups are checked.

    Args:
        values: of the manifest; a file with weights counts from its folder.
        stages: as they are written.
        sequence_length: of the mixture.
        sources, groups: what weights may name; of groups, the weights of the members of each.

    Raises:
        UsageError: a key or value is refused, or a group that is a source too, contains itself or
            reaches a source twice; the message has its line.
        InputError: a file with weights cannot be read.
    """
    context = _Context(values, sources, groups)
    for name, weights in groups.items():
        if name in sources:
            raise UsageError(
                f"{name!r} is a source and a group",
                where=values.where(("groups", name)),
                fix="give the group, or the source, another name",
            )
        _check_weights(context, ("groups", name), weights)
    parsed: list[StageSpec] = []
    for index, keys in enumerate(stages):
        path: KeyPath = ("stages", index)
        stage = _stage(context, path, keys, sequence_length)
        if stage.name in [earlier.name for earlier in parsed]:
            raise UsageError(f"two stages are named {stage.name!r}", where=values.where(path))
        parsed.append(stage)
    if sum(stage.tokens for stage in parsed) > MAX_COUNT:
        raise UsageError("the run has more than 2^62 tokens", where=values.where(("stages",)))
    return tuple(parsed)


def _stage(context: _Context, path: KeyPath, keys: StageKeys, longest: int) -> StageSpec:
    values, name = context.values, keys.name
    ways = [way for way in WAYS if getattr(keys, way) is not None]
    if len(ways) != 1:
        raise UsageError(
            f"stage {name!r} needs exactly one of {', '.join(WAYS)}; it has "
            f"{', '.join(ways) or 'none'}",
            where=values.where(path),
            fix="write tokens: 95B, weights: {web: 85, code: 15}  or  "
            "tokens_from: {web: 2B, code: 3B}  or  epochs: {web: 1, code: 2}",
        )
    way, tokens, file = ways[0], keys.tokens or 0, None
    weights: Mapping[str, Fraction] = {}
    epochs: dict[str, Fraction] = {}
    if way in ("weights", "weights_file"):
        if not tokens:
            raise UsageError(
                f"stage {name!r} has {way} but no `tokens`",
                where=values.where(path),
                fix="add its length: tokens: 95B",
            )
        if keys.weights_file is not None:
            weights, file = _weights_file(context, (*path, way), keys.weights_file)
        else:
            weights = keys.weights or {}
            _check_weights(context, (*path, way), weights)
        if keys.weights_to is not None:
            _check_weights(context, (*path, "weights_to"), keys.weights_to)
    elif keys.tokens_from is not None:
        tokens = _tokens_from(context, path, keys, keys.tokens_from)
        weights = {name: Fraction(amount) for name, amount in keys.tokens_from.items()}
    else:
        epochs = _by_epochs(context, (*path, way), keys.epochs)
        if tokens:
            raise UsageError(
                f"stage {name!r} has epochs and tokens",
                where=values.where((*path, "tokens")),
                why="with epochs, the sizes of the sources say how long the stage is",
                fix="remove `tokens`, or write weights instead of epochs",
            )
    return StageSpec(
        name=name,
        tokens=tokens,
        tree=expand(weights, context.groups),
        tree_to=expand(keys.weights_to or {}, context.groups),
        epochs=epochs,
        max_epochs=_by_epochs(context, (*path, "max_epochs"), keys.max_epochs),
        weights_file=file,
        sequence_length=_length(values, (*path, "sequence_length"), keys.sequence_length, longest),
    )


def _length(values: Values, path: KeyPath, length: int | None, longest: int) -> int | None:
    """Return the sequence length of a stage, None where it is the mixture's own."""
    if length is not None and longest % length:
        near = next(n for n in range(min(length, longest), 0, -1) if longest % n == 0)
        raise UsageError(
            f"the stage's sequence_length {length:,} does not divide the mixture's {longest:,}",
            where=values.where(path),
            why="each row of the mixture is cut into whole shorter rows",
            fix=f"write {near:,}, or let the mixture's sequence_length be that of the longest "
            "stage and a multiple of the others",
        )
    return None if length == longest else length


def _tokens_from(
    context: _Context, path: KeyPath, keys: StageKeys, amounts: Mapping[str, int]
) -> int:
    """Return the length of a stage that says how many tokens of each source it has."""
    context.refuse((*path, "tokens_from"), amounts)
    total = sum(amounts.values())
    if keys.tokens not in (None, total):
        raise UsageError(
            f"stage {keys.name!r} says {keys.tokens:,} tokens, but its tokens_from sums to "
            f"{total:,}",
            where=context.values.where((*path, "tokens")),
            fix="remove `tokens`, or correct one of them",
        )
    return total


def _by_epochs(
    context: _Context, path: KeyPath, numbers: Mapping[str, Fraction] | None
) -> dict[str, Fraction]:
    """Return a number for each source; a group's number is that of each of its sources."""
    context.refuse(path, numbers or {})
    return {
        source: number
        for name, number in (numbers or {}).items()
        for source in sources_of(name, context.groups)
    }


def _weights_file(
    context: _Context, path: KeyPath, name: str
) -> tuple[dict[str, Fraction], tuple[str, str]]:
    """Return the weights of a file, and its name and sha256."""
    file = os.path.join(context.values.folder, name)
    try:
        with open_regular(file) as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"cannot read the file with the weights: {error.strerror}",
            where=f"{file} (from {context.values.where(path)})",
            fix=nearest(file, "check the path; it starts from the manifest's folder"),
        ) from None
    content = Values.parse(raw, file, numbers="exact", digits_only=True)
    weights: dict[str, Fraction] = parse(Weights, content)
    _check_weights(replace(context, values=content), (), weights)
    return weights, (os.path.basename(name), hashlib.sha256(raw).hexdigest())


def _check_weights(context: _Context, path: KeyPath, weights: Mapping[str, Fraction]) -> None:
    context.refuse(path, weights)
    if not any(weights.values()):
        raise UsageError(
            "the weights sum to 0: no source can be drawn",
            where=context.values.where(path),
            fix="give at least one source a positive weight, such as 1",
        )
