"""The mixture manifest: what a user writes by hand in manifest.yaml, read into exact values.

    manifest.yaml --strict_yaml--> keys and values checked, with lines --> Mixture

Numbers are read from the text as integers and fractions; 0.1 is one tenth. Paths are relative to
the manifest's folder. Never: open a dataset or change a value silently. docs/reference/mixture.md
lists every key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from olm_data.errors import UsageError, printable, suggest
from olm_data.mixture.packing import PACKINGS
from olm_data.mixture.shares import normalise
from olm_data.storage.store import is_remote
from olm_data.strict_yaml import MAX_INTEGER, Document, check_keys, load, load_file

DEFAULT_MAX_EPOCHS = Fraction(4)
MAX_SEQUENCE_LENGTH = 1 << 24
MAX_TOKENS = 1 << 62
ON_EXHAUSTED = ("error",)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SIZE = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)([KMBT])?")
_POWER = {None: 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_EXAMPLE = "stages:\n    - {name: main, tokens: 1B, weights: {web: 85, code: 15}}"


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """One source: `data` is the dataset's folder or URL as written in the manifest."""

    name: str
    data: str
    max_epochs: Fraction


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage: its tokens, and the exact share of each weighted source (they sum to 1)."""

    name: str
    tokens: int
    shares: Mapping[str, Fraction]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A parsed manifest. Sources are in order of their names, stages in the order of the run."""

    folder: str
    seed: int
    sequence_length: int
    packing: str
    min_tail: int
    sources: tuple[SourceSpec, ...]
    stages: tuple[StageSpec, ...]
    on_exhausted: str
    document: Document = field(repr=False, compare=False)

    def where(self, *keys: str | int) -> str:
        """Return `path:line` of a key path of the manifest."""
        return self.document.where(*keys)

    def location(self, source: SourceSpec) -> str:
        """Return the source's dataset as an absolute path or URL."""
        if is_remote(source.data):
            return source.data
        return os.path.abspath(os.path.join(self.folder, source.data))


def read_mixture(path: str | Path) -> Mixture:
    """Read a manifest file.

    Raises:
        InputError: the file cannot be read.
        UsageError: a key or value is refused; the message has its line.
    """
    return _mixture(load_file(path), os.path.dirname(os.path.abspath(path)))


def parse_mixture(text: str | bytes, path: str = "manifest.yaml", folder: str = ".") -> Mixture:
    """Parse a manifest's text; `path` is for messages, data paths are relative to `folder`."""
    return _mixture(load(text, path), os.path.abspath(folder))


def parse_tokens(value: Any, where: str) -> int:
    """Return an exact count from `95B`, `1.5M`, `2_000_000` or a YAML number; K M B T are 1000^n.

    Raises:
        UsageError: not a count, not whole, or not in 1 .. 2^62.
    """
    exact: Fraction | None = None
    if isinstance(value, (int, Fraction)) and not isinstance(value, bool):
        exact = Fraction(value)
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        exact = Fraction(match[1].replace("_", "")) * _POWER[match[2]]
    if exact is None:
        raise UsageError(
            f"{_shown(value)} is not a number of tokens",
            where=where,
            fix="write a whole number, with K, M, B or T for powers of 1000: 2_000_000, 1.5B, 95B",
        )
    if exact.denominator != 1 or not 1 <= exact <= MAX_TOKENS:
        raise UsageError(
            f"{_shown(value)} is not a whole number of tokens from 1 to 2^62", where=where
        )
    return int(exact)


def _mixture(document: Document, folder: str) -> Mixture:
    top = _mapping(document, ())
    check_keys(
        top,
        (
            "version",
            "seed",
            "sequence_length",
            "packing",
            "min_tail",
            "sources",
            "stages",
            "on_exhausted",
        ),
        document.where,
    )
    for key, example in (
        ("version", "version: 1"),
        ("sequence_length", "sequence_length: 2048"),
        ("sources", "sources:\n    web: {data: ./tokens/web}"),
        ("stages", _EXAMPLE),
    ):
        if key not in top:
            raise UsageError(
                f"the key {key!r} is missing", where=document.where(), fix=f"add\n  {example}"
            )
    _integer(document, ("version",), 1, 1)
    sources = _sources(document)
    packing = _choice(document, "packing", PACKINGS)
    if "min_tail" in top and packing != "best_fit":
        raise UsageError(
            f"min_tail has no meaning with packing: {packing}",
            where=document.where("min_tail"),
            fix="leave it out, or write packing: best_fit",
        )
    return Mixture(
        folder=folder,
        seed=_integer(document, ("seed",), 0, MAX_INTEGER) if "seed" in top else 0,
        sequence_length=_integer(document, ("sequence_length",), 1, MAX_SEQUENCE_LENGTH),
        packing=packing,
        min_tail=_integer(document, ("min_tail",), 1, MAX_SEQUENCE_LENGTH)
        if "min_tail" in top
        else 1,
        sources=sources,
        stages=_stages(document, [source.name for source in sources]),
        on_exhausted=_choice(document, "on_exhausted", ON_EXHAUSTED),
        document=document,
    )


def _sources(document: Document) -> tuple[SourceSpec, ...]:
    sources = []
    for name in sorted(_mapping(document, ("sources",))):
        keys = ("sources", name)
        _check_name(name, "source", document.where(*keys))
        spec = _mapping(document, keys)
        check_keys(
            spec,
            ("data", "max_epochs"),
            partial(document.where, *keys),
            required=("data",),
        )
        epochs = DEFAULT_MAX_EPOCHS
        if "max_epochs" in spec:
            epochs = _number(document, (*keys, "max_epochs"))
            if epochs <= 0:
                raise UsageError(
                    "max_epochs must be more than 0", where=document.where(*keys, "max_epochs")
                )
        sources.append(SourceSpec(name=name, data=_data(document, keys), max_epochs=epochs))
    return tuple(sources)


def _stages(document: Document, known: list[str]) -> tuple[StageSpec, ...]:
    stages = document.value["stages"]
    if not isinstance(stages, list) or not stages:
        raise UsageError(
            "stages must be a list with at least one stage",
            where=document.where("stages"),
            fix=f"write\n  {_EXAMPLE}",
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
    stage = _mapping(document, keys)
    check_keys(
        stage,
        ("name", "tokens", "weights", "tokens_from"),
        partial(document.where, *keys),
        required=("name",),
    )
    name = stage["name"]
    _check_name(name, "stage", document.where(*keys, "name"))
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
        return StageSpec(name=name, tokens=tokens, shares=_weights(document, keys, known))
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
    return StageSpec(name=name, tokens=total, shares=shares)


def _weights(
    document: Document, keys: tuple[str | int, ...], known: list[str]
) -> dict[str, Fraction]:
    keys = (*keys, "weights")
    weights = {s: _number(document, (*keys, s)) for s in _by_source(document, keys, known)}
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
    values = _mapping(document, keys)
    for source in values:
        if source not in known:
            raise UsageError(
                f"there is no source {printable(source)!r}",
                where=document.where(*keys, source),
                fix=suggest(source, known),
            )
    return values


def _data(document: Document, keys: tuple[str | int, ...]) -> str:
    """Return the data location; what would store a secret or forge a message is refused."""
    where = document.where(*keys, "data")
    data = _value(document, (*keys, "data"))
    if not isinstance(data, str) or not data or not data.isprintable():
        raise UsageError(
            f"{_shown(data)} is not a path or URL of a dataset",
            where=where,
            fix="write the folder that olm-data tokenize wrote: data: ./tokens/web",
        )
    if is_remote(data) and ("?" in data or "@" in data.split("://", 1)[1].split("/", 1)[0]):
        raise UsageError(
            "a URL with a user, password or query is not allowed here",
            where=where,
            why="the lock records the URL, and a secret in it would be copied with every run",
            fix="give the plain URL, and the credentials by the environment",
        )
    return data.removeprefix("file://")


def _value(document: Document, keys: tuple[str | int, ...]) -> Any:
    value = document.value
    for key in keys:
        value = value[key]
    return value


def _mapping(document: Document, keys: tuple[str | int, ...]) -> dict[str, Any]:
    value = _value(document, keys)
    if not isinstance(value, dict) or not value:
        name = printable(str(keys[-1])) if keys else "the manifest"
        raise UsageError(
            f"{name} must be a mapping with at least one `key: value`",
            where=document.where(*keys),
            fix="see docs/reference/mixture.md for an example",
        )
    return value


def _number(document: Document, keys: tuple[str | int, ...]) -> Fraction:
    value = _value(document, keys)
    if isinstance(value, bool) or not isinstance(value, (int, Fraction)):
        raise UsageError(
            f"{_shown(value)} is not a number",
            where=document.where(*keys),
            fix="write a number without quotes, such as 15 or 0.25",
        )
    return Fraction(value)


def _integer(document: Document, keys: tuple[str | int, ...], low: int, high: int) -> int:
    value = _number(document, keys)
    if value.denominator != 1 or not low <= value <= high:
        wanted = f"{low}" if low == high else f"a whole number from {low:,} to {high:,}"
        raise UsageError(f"{keys[-1]} must be {wanted}", where=document.where(*keys))
    return int(value)


def _choice(document: Document, key: str, choices: tuple[str, ...]) -> str:
    """Return the value of a top-level key that names one of `choices`; the first is the default."""
    value = document.value.get(key, choices[0])
    if value not in choices:
        raise UsageError(
            f"{key} cannot be {_shown(value)}",
            where=document.where(key),
            fix=f"this version accepts: {', '.join(choices)}",
        )
    return str(value)


def _check_name(name: Any, kind: str, where: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"{_shown(name)} is not a {kind} name",
            where=where,
            fix="use up to 64 letters, digits, `.`, `_` and `-`, a letter or digit first",
        )


def _shown(value: Any) -> str:
    if isinstance(value, Fraction):
        return f"{float(value):g}"
    return repr(value) if not isinstance(value, str) else f"'{printable(value[:80])}'"
