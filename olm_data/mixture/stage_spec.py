"""Stages of a mixture manifest, read into exact values.

    `groups`, `stages` of the Document --parse_stages--> StageSpec, one a stage
    weights_file --------------------------------------^

Never: open a dataset, or know its size. docs/reference/mixture.md lists the keys.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from olm_data.config.strict_yaml import MAX_BYTES, Document, KeyPath, check_keys, load
from olm_data.counts import MAX_COUNT, parse_count
from olm_data.errors import InputError, UsageError, printable, quoted, suggest
from olm_data.mixture.groups import GroupError, Groups, Share, expand, leaves, sources_of
from olm_data.mixture.manifest_values import (
    MAX_SEQUENCE_LENGTH,
    check_name,
    integer_at,
    mapping_at,
    number_at,
    value_at,
)
from olm_data.regular_files import open_regular

EXAMPLE = "stages:\n      - {name: main, tokens: 1B, weights: {web: 85, code: 15}}"
WAYS = ("weights", "weights_file", "tokens_from", "epochs")


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
    """

    name: str
    tokens: int
    tree: tuple[Share, ...]
    epochs: Mapping[str, Fraction]
    max_epochs: Mapping[str, Fraction]
    weights_file: tuple[str, str] | None
    sequence_length: int | None = None

    @property
    def shares(self) -> dict[str, Fraction]:
        """The exact share of each weighted source; they sum to 1."""
        return leaves(self.tree)


@dataclass(frozen=True)
class _Reader:
    """What stages are read against: sources and groups by name, and the manifest's folder."""

    document: Document
    folder: str
    sources: list[str]
    groups: Groups


def parse_groups(document: Document, sources: list[str]) -> dict[str, dict[str, Fraction]]:
    """Return the weights of the members of each group.

    Raises:
        UsageError: a group that is a source too, contains itself or reaches a source twice.
    """
    if "groups" not in document.value:
        return {}
    names = list(mapping_at(document, ("groups",)))
    known = [*sources, *names]
    groups: dict[str, dict[str, Fraction]] = {}
    for name in names:
        keys = ("groups", name)
        check_name(name, "group", document.where(*keys))
        if name in sources:
            raise UsageError(
                f"{name!r} is a source and a group",
                where=document.where(*keys),
                fix="give the group, or the source, another name",
            )
        groups[name] = _weights(document, keys, known)
    try:
        for name in names:
            sources_of(name, groups)
    except GroupError as error:
        raise UsageError(
            error.what,
            where=document.where("groups", error.group, error.member),
            fix=f"remove {error.member!r} from group {error.group!r}, or from the other place",
        ) from None
    return groups


def parse_stages(
    document: Document, folder: str, sources: list[str], groups: Groups
) -> tuple[StageSpec, ...]:
    """Return the stages of a manifest in `folder`, in the order of the run.

    Raises:
        UsageError: a key or value is refused; the message has its line.
        InputError: a file with weights cannot be read.
    """
    stages = document.value["stages"]
    if not isinstance(stages, list) or not stages:
        raise UsageError(
            "stages must be a list with at least one stage",
            where=document.where("stages"),
            fix=f"write\n    {EXAMPLE}",
        )
    reader = _Reader(document, folder, sources, groups)
    parsed: list[StageSpec] = []
    for index in range(len(stages)):
        stage = _stage(reader, ("stages", index))
        if stage.name in [earlier.name for earlier in parsed]:
            raise UsageError(
                f"two stages are named {stage.name!r}", where=document.where("stages", index)
            )
        parsed.append(stage)
    if sum(stage.tokens for stage in parsed) > MAX_COUNT:
        raise UsageError("the run has more than 2^62 tokens", where=document.where("stages"))
    return tuple(parsed)


def _stage(reader: _Reader, keys: KeyPath) -> StageSpec:
    document, known = reader.document, [*reader.sources, *reader.groups]
    stage = mapping_at(document, keys)
    check_keys(
        stage,
        ("name", "tokens", *WAYS, "max_epochs", "sequence_length"),
        partial(document.where, *keys),
        required=("name",),
    )
    name = stage["name"]
    check_name(name, "stage", document.where(*keys, "name"))
    ways = [way for way in WAYS if way in stage]
    if len(ways) != 1:
        raise UsageError(
            f"stage {name!r} needs exactly one of {', '.join(WAYS)}; it has "
            f"{', '.join(ways) or 'none'}",
            where=document.where(*keys),
            fix="write tokens: 95B, weights: {web: 85, code: 15}  or  "
            "tokens_from: {web: 2B, code: 3B}  or  epochs: {web: 1, code: 2}",
        )
    way, tokens, epochs, file = ways[0], 0, {}, None
    weights: dict[str, Fraction] = {}
    if way in ("weights", "weights_file"):
        if "tokens" not in stage:
            raise UsageError(
                f"stage {name!r} has {way} but no `tokens`",
                where=document.where(*keys),
                fix="add its length: tokens: 95B",
            )
        tokens = parse_count(stage["tokens"], document.where(*keys, "tokens"))
        if way == "weights":
            weights = _weights(document, (*keys, way), known)
        else:
            content, file = _weights_file(reader, (*keys, way))
            weights = _weights(content, (), known)
    elif way == "tokens_from":
        amounts = _tokens_from(reader, keys, known)
        tokens, weights = sum(amounts.values()), {n: Fraction(a) for n, a in amounts.items()}
    else:
        epochs = _by_epochs(reader, (*keys, way), known)
        if "tokens" in stage:
            raise UsageError(
                f"stage {name!r} has epochs and tokens",
                where=document.where(*keys, "tokens"),
                why="with epochs, the sizes of the sources say how long the stage is",
                fix="remove `tokens`, or write weights instead of epochs",
            )
    try:
        tree = expand(weights, reader.groups) if weights else ()
    except GroupError as error:
        raise UsageError(
            f"stage {name!r}: {error.what}",
            where=document.where(*keys, way, error.member),
            fix=f"remove {error.member!r} here, or the other one",
        ) from None
    return StageSpec(
        name=name,
        tokens=tokens,
        tree=tree,
        epochs=epochs,
        max_epochs=_by_epochs(reader, (*keys, "max_epochs"), known)
        if "max_epochs" in stage
        else {},
        weights_file=file,
        sequence_length=_length(document, keys) if "sequence_length" in stage else None,
    )


def _length(document: Document, keys: KeyPath) -> int | None:
    """Return the sequence length of a stage, None where it is the mixture's own."""
    keys = (*keys, "sequence_length")
    longest = integer_at(document, ("sequence_length",), 1, MAX_SEQUENCE_LENGTH)
    length = integer_at(document, keys, 1, MAX_SEQUENCE_LENGTH)
    if longest % length:
        near = next(n for n in range(min(length, longest), 0, -1) if longest % n == 0)
        raise UsageError(
            f"the stage's sequence_length {length:,} does not divide the mixture's {longest:,}",
            where=document.where(*keys),
            why="each row of the mixture is cut into whole shorter rows",
            fix=f"write {near:,}, or let the mixture's sequence_length be that of the longest "
            "stage and a multiple of the others",
        )
    return None if length == longest else length


def _tokens_from(reader: _Reader, keys: KeyPath, known: list[str]) -> dict[str, int]:
    document, stage = reader.document, mapping_at(reader.document, keys)
    amounts = {
        name: parse_count(value, document.where(*keys, "tokens_from", name))
        for name, value in _by_name(document, (*keys, "tokens_from"), known).items()
    }
    if "tokens" in stage:
        place = document.where(*keys, "tokens")
        tokens, total = parse_count(stage["tokens"], place), sum(amounts.values())
        if tokens != total:
            raise UsageError(
                f"stage {stage['name']!r} says {tokens:,} tokens, but its tokens_from sums to "
                f"{total:,}",
                where=place,
                fix="remove `tokens`, or correct one of them",
            )
    return amounts


def _by_epochs(reader: _Reader, keys: KeyPath, known: list[str]) -> dict[str, Fraction]:
    """Return a positive number for each source; a group's number is that of each of its sources."""
    document = reader.document
    found: dict[str, Fraction] = {}
    for name in _by_name(document, keys, known):
        number = number_at(document, (*keys, name))
        if number <= 0:
            raise UsageError(
                f"{keys[-1]} of {name!r} must be more than 0", where=document.where(*keys, name)
            )
        for source in sources_of(name, reader.groups):
            if source in found:
                raise UsageError(
                    f"source {source!r} is reached twice",
                    where=document.where(*keys, name),
                    fix=f"remove {name!r} here, or the other one",
                )
            found[source] = number
    return found


def _weights_file(reader: _Reader, keys: KeyPath) -> tuple[Document, tuple[str, str]]:
    """Return the content of a file with weights, and its name and sha256."""
    name, where = value_at(reader.document, keys), reader.document.where(*keys)
    if not isinstance(name, str) or not name or not name.isprintable():
        raise UsageError(
            f"{quoted(name)} is not the path of a file",
            where=where,
            fix="write the YAML or JSON file with the weights: weights_file: ./weights.json",
        )
    path = os.path.join(reader.folder, name)
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"cannot read the file with the weights: {error.strerror}",
            where=f"{printable(path)} (from {where})",
            fix="check the path; it starts from the manifest's folder",
        ) from None
    digest = hashlib.sha256(raw).hexdigest()
    return load(raw, path), (os.path.basename(name), digest)


def _weights(document: Document, keys: KeyPath, known: list[str]) -> dict[str, Fraction]:
    weights = {n: number_at(document, (*keys, n)) for n in _by_name(document, keys, known)}
    for name, weight in weights.items():
        if weight < 0:
            raise UsageError(
                f"the weight of {name!r} is negative", where=document.where(*keys, name)
            )
    if not any(weights.values()):
        raise UsageError(
            "the weights sum to 0: no source can be drawn",
            where=document.where(*keys),
            fix="give at least one source a positive weight, such as 1",
        )
    return weights


def _by_name(document: Document, keys: KeyPath, known: list[str]) -> dict[str, Any]:
    """Return a mapping whose keys are all known sources or groups."""
    values = mapping_at(document, keys)
    for name in values:
        if name not in known:
            raise UsageError(
                f"there is no source {printable(name)!r}",
                where=document.where(*keys, name),
                fix=suggest(name, known),
            )
    return values
