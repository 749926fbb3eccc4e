"""Stages of a mixture manifest, read into exact values.

    `stages` of the Document --parse_stages--> StageSpec, one a stage

Never: open a dataset, or know its size. docs/reference/mixture.md lists the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from olm_data.errors import UsageError, printable, suggest
from olm_data.mixture.manifest_values import (
    MAX_SEQUENCE_LENGTH,
    MAX_TOKENS,
    check_name,
    integer_at,
    mapping_at,
    number_at,
    parse_tokens,
)
from olm_data.mixture.shares import normalise
from olm_data.strict_yaml import Document, check_keys

EXAMPLE = "stages:\n    - {name: main, tokens: 1B, weights: {web: 85, code: 15}}"


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage: its tokens, and the exact share of each weighted source (they sum to 1).

    `sequence_length` is what its rows are cut into, None where they stay whole.
    """

    name: str
    tokens: int
    shares: Mapping[str, Fraction]
    sequence_length: int | None = None


def parse_stages(document: Document, known: list[str]) -> tuple[StageSpec, ...]:
    stages = document.value["stages"]
    if not isinstance(stages, list) or not stages:
        raise UsageError(
            "stages must be a list with at least one stage",
            where=document.where("stages"),
            fix=f"write\n  {EXAMPLE}",
        )
    parsed: list[StageSpec] = []
    for index in range(len(stages)):
        stage = _stage(document, index, known)
        if stage.name in [earlier.name for earlier in parsed]:
            raise UsageError(
                f"two stages are named {stage.name!r}", where=document.where("stages", index)
            )
        parsed.append(stage)
    if sum(stage.tokens for stage in parsed) > MAX_TOKENS:
        raise UsageError("the run has more than 2^62 tokens", where=document.where("stages"))
    return tuple(parsed)


def _stage(document: Document, index: int, known: list[str]) -> StageSpec:
    keys = ("stages", index)
    stage = mapping_at(document, keys)
    check_keys(
        stage,
        ("name", "tokens", "weights", "tokens_from", "sequence_length"),
        partial(document.where, *keys),
        required=("name",),
    )
    name = stage["name"]
    check_name(name, "stage", document.where(*keys, "name"))
    length = _length(document, keys) if "sequence_length" in stage else None
    if ("weights" in stage) == ("tokens_from" in stage):
        raise UsageError(
            f"stage {name!r} needs either `weights` or `tokens_from`",
            where=document.where(*keys),
            fix="write tokens: 95B, weights: {web: 85, code: 15}  or  "
            "tokens_from: {web: 2B, code: 3B}",
        )
    if "weights" in stage:
        if "tokens" not in stage:
            raise UsageError(
                f"stage {name!r} has weights but no `tokens`",
                where=document.where(*keys),
                fix="add its length: tokens: 95B",
            )
        tokens = parse_tokens(stage["tokens"], document.where(*keys, "tokens"))
        return StageSpec(
            name=name,
            tokens=tokens,
            shares=_weights(document, keys, known),
            sequence_length=length,
        )
    amounts = {
        source: parse_tokens(value, document.where(*keys, "tokens_from", source))
        for source, value in _by_source(document, (*keys, "tokens_from"), known).items()
    }
    total = sum(amounts.values())
    if "tokens" in stage:
        place = document.where(*keys, "tokens")
        tokens = parse_tokens(stage["tokens"], place)
        if tokens != total:
            raise UsageError(
                f"stage {name!r} says {tokens:,} tokens, but its tokens_from sums to {total:,}",
                where=place,
                fix="remove `tokens`, or correct one of them",
            )
    shares = {source: Fraction(amount, total) for source, amount in amounts.items()}
    return StageSpec(name=name, tokens=total, shares=shares, sequence_length=length)


def _length(document: Document, keys: tuple[str | int, ...]) -> int | None:
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


def _weights(
    document: Document, keys: tuple[str | int, ...], known: list[str]
) -> dict[str, Fraction]:
    keys = (*keys, "weights")
    weights = {s: number_at(document, (*keys, s)) for s in _by_source(document, keys, known)}
    for source, weight in weights.items():
        if weight < 0:
            raise UsageError(
                f"the weight of {source!r} is negative", where=document.where(*keys, source)
            )
    if not any(weights.values()):
        raise UsageError(
            "the weights sum to 0: no source can be drawn",
            where=document.where(*keys),
            fix="give at least one source a positive weight, such as 1",
        )
    return dict(zip(weights, normalise(list(weights.values())), strict=True))


def _by_source(document: Document, keys: tuple[str | int, ...], known: list[str]) -> dict[str, Any]:
    values = mapping_at(document, keys)
    for source in values:
        if source not in known:
            raise UsageError(
                f"there is no source {printable(source)!r}",
                where=document.where(*keys, source),
                fix=suggest(source, known),
            )
    return values
