"""A manifest made of the mixture of another project: OLMo-core source lists, Megatron blends.

    source_mixture.yaml | blend list --read_mixture_file--> ForeignMixture --manifest_text--> text

Formats: OLMo-core `SourceMixtureList` (sources with source_name, target_ratio, paths,
max_repetition_ratio, max_source_fraction), alone or under `source_list` beside requested_tokens and
seed; Megatron-LM `--data-path` (`weight prefix weight prefix ...`, or prefixes alone), and the JSON
of `--per-split-data-args-path`, of which `train` is taken. Weights are exact as written.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from olm_data.config.convert import parse
from olm_data.config.schema import modeline
from olm_data.config.strict_yaml import scalar
from olm_data.config.values import KeyPath, Values
from olm_data.counts import parse_count
from olm_data.errors import UsageError, printable, quoted
from olm_data.mixture.manifest import SCHEMA
from olm_data.storage.objects import WRITABLE, scheme_of
from olm_data.storage.store import is_remote


@dataclass(frozen=True)
class ForeignSource:
    """One source: a name that a manifest may hold, its weight (None: by size), and its files."""

    name: str
    weight: Fraction | None
    paths: tuple[str, ...]
    max_epochs: Fraction | None


@dataclass(frozen=True)
class ForeignMixture:
    """What another project's file says; None where it does not say."""

    sources: tuple[ForeignSource, ...]
    tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class _OlmoCoreSource:
    """An item of OLMo-core's `SourceMixtureList`, as it is written."""

    source_name: Any
    target_ratio: Fraction
    paths: tuple[str, ...]
    max_repetition_ratio: Fraction = Fraction(1)
    max_source_fraction: Fraction = Fraction(1)


def read_mixture_file(raw: bytes, path: str) -> ForeignMixture:
    """Read a file of either project; what it is, its content says.

    Raises:
        UsageError: neither, or a value that has no meaning here, with its line.
    """
    text = raw.decode("utf-8", "replace")
    start = text.lstrip()[:1]
    if start != "{" and not re.search(r"(?m)^\s*[\w]+:", text):
        try:
            words = shlex.split(text.replace("\\\n", " "), comments=True)
        except ValueError as error:  # a quote without end
            raise UsageError(
                "this is neither a mixture of OLMo-core nor a blend list of Megatron",
                where=path,
                why=str(error),
                fix="a blend list holds weights and prefixes: 30 data/web 70 data/code",
            ) from error
        return _blend(words, path)
    values = Values.parse(raw, path, numbers="exact", digits_only=True)
    value = values.data
    keys: KeyPath = ()
    if "source_list" in value:
        keys = ("source_list",)
        parse(dict[str, Any], values, keys)
    if "train" in value:
        if not isinstance(value["train"], list):
            raise UsageError("train must be a list", where=values.where(("train",)))
        return _blend([_word(item, values) for item in value["train"]], path)
    return _source_list(values, keys)


def _word(item: Any, values: Values) -> str:
    if isinstance(item, Fraction):
        return f"{item.numerator}/{item.denominator}"
    if isinstance(item, (str, int)) and not isinstance(item, bool):
        return str(item)
    raise UsageError(
        f"{quoted(item)} is neither a weight nor a prefix", where=values.where(("train",))
    )


def _source_list(values: Values, path: KeyPath) -> ForeignMixture:
    top = values.data
    listed = (top["source_list"] if path else top).get("sources")
    if not isinstance(listed, list) or not listed:
        raise UsageError(
            "this is neither an OLMo-core source mixture, which has a list `sources`, "
            "nor a Megatron blend",
            where=values.where(path),
            fix="give a YAML with sources: [{source_name: ..., target_ratio: ..., paths: [...]}], "
            "or a text file with `weight prefix weight prefix ...`",
        )
    found = []
    for index in range(len(listed)):
        at = (*path, "sources", index)
        source = parse(_OlmoCoreSource, values, at)
        repeats = source.max_repetition_ratio * source.max_source_fraction
        if source.target_ratio < 0 or repeats <= 0:
            raise UsageError(
                "target_ratio must not be negative; max_repetition_ratio and max_source_fraction "
                "must be more than 0",
                where=values.where(at),
            )
        name = _name(str(source.source_name))
        found.append(ForeignSource(name, source.target_ratio, source.paths, repeats))
    _refuse_twice([source.name for source in found], values.where((*path, "sources")))
    tokens = top.get("requested_tokens")
    return ForeignMixture(
        tuple(found),
        None if tokens is None else parse_count(tokens, values.where(("requested_tokens",))),
        int(parse(Fraction, values, ("seed",))) if "seed" in top else None,
    )


def _blend(words: list[str], path: str) -> ForeignMixture:
    """Read `weight prefix ...`, or prefixes alone, as Megatron-LM's get_blend_from_list does."""
    if words[:1] == ["--data-path"]:
        words = words[1:]
    if not words:
        raise UsageError("the blend list is empty", where=path, fix="write `weight prefix ...`")
    weights = [_weight(word, path) for word in words[::2]] if len(words) % 2 == 0 else [None]
    if None in weights and any(weight is not None for weight in weights):
        raise UsageError(
            "some weights of the blend are not numbers",
            where=path,
            why=f"read in pairs: {' '.join(words[:4])} ...",
            fix="write a weight before each prefix, or prefixes alone to mix by size",
        )
    alone = None in weights
    prefixes = words if alone else words[1::2]
    _refuse_twice(prefixes, path)
    stems = [prefix.rstrip("/").removesuffix("_text_document") for prefix in prefixes]
    short = [stem.rsplit("/", 1)[-1] for stem in stems]
    names = [
        _name(s if short.count(s) == 1 else "-".join(stem.split("/")[-2:]))
        for s, stem in zip(short, stems, strict=True)
    ]
    _refuse_twice(names, path)
    found = zip(names, [None] * len(names) if alone else weights, prefixes, strict=True)
    return ForeignMixture(
        tuple(ForeignSource(name, weight, (prefix,), None) for name, weight, prefix in found)
    )


def _weight(word: str, path: str) -> Fraction | None:
    if re.fullmatch(r"[0-9]+/[0-9]+", word):  # of a JSON list, where numbers are exact already
        return Fraction(word)
    value = scalar(word, path, "exact")
    if isinstance(value, bool) or not isinstance(value, (int, Fraction)):
        return None
    if value < 0:
        raise UsageError(f"the weight {printable(word)} is negative", where=path)
    return Fraction(value)


def _name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:64] or "source"


def _refuse_twice(names: list[str], where: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"{printable(name)!r} stands for two sources",
                where=where,
                fix="give one of them another name, or put them together with the sum of their "
                "weights",
            )


def manifest_text(
    mixture: ForeignMixture,
    *,
    origin: str,
    sequence_length: int,
    tokens: int | None,
    data: str,
    folder: str = ".",
) -> str:
    """Return the text of a manifest.

    Args:
        mixture: what was read.
        origin: the file's name, for the comment.
        sequence_length: of the manifest.
        tokens: of its one stage; None for what the file says.
        data: folder in which each source's dataset lies or will lie, under the source's name.
        folder: of the manifest.

    Raises:
        UsageError: nobody says how many tokens, or somebody does although sizes decide.
    """
    by_size = any(source.weight is None for source in mixture.sources)
    tokens = tokens or mixture.tokens
    if by_size and tokens:
        raise UsageError(
            "the blend has no weights, so each source is gone through once and the sizes decide",
            where=origin,
            fix="leave out --tokens, or write a weight before each prefix",
        )
    if not by_size and not tokens:
        raise UsageError(
            "the file does not say how many tokens to train on",
            where=origin,
            fix="--tokens 100B, or add requested_tokens to an OLMo-core file",
        )
    lines = [
        modeline(SCHEMA, folder),
        f"# made by olm-data import from {printable(origin)}",
        "version: 1",
    ]
    lines += [] if mixture.seed is None else [f"seed: {mixture.seed}"]
    lines += [f"sequence_length: {sequence_length}", "sources:"]
    for source in mixture.sources:
        cap = "" if source.max_epochs is None else f", max_epochs: {_number(source.max_epochs)}"
        location = json.dumps(f"{data.rstrip('/')}/{source.name}", ensure_ascii=False)
        lines.append(f'  "{source.name}": {{data: {location}{cap}}}')
        lines += [f"    # {printable(path)}" for path in source.paths]
    weights = ", ".join(
        f'"{s.name}": {1 if s.weight is None else _number(s.weight)}' for s in mixture.sources
    )
    how = f"epochs: {{{weights}}}" if by_size else f"tokens: {tokens}, weights: {{{weights}}}"
    return "\n".join([*lines, "stages:", f"  - {{name: main, {how}}}"]) + "\n"


def import_command(
    source: ForeignSource, *, data: str, output: str, tokenizer: str | None, dtype: str | None
) -> str | None:
    """Return the shell command that makes the dataset of a source.

    Args:
        data: as in the manifest: relative to its folder.
        output: path of the manifest.
        tokenizer, dtype: of the token files; words in capitals stand for what is not known.

    Returns:
        None where `olm-data import` cannot take its paths: storage that cannot be listed,
        or patterns that neither a shell nor a folder stands for.
    """
    arguments = [_argument(path) for path in source.paths]
    if None in arguments:
        return None
    words = ["olm-data", "import", *map(str, arguments), "--tokenizer"]
    words.append(shlex.quote(tokenizer or "TOKENIZER"))
    if any(path.endswith((".npy", "*")) for path in source.paths):  # these do not say their dtype
        words += ["--dtype", dtype or "DTYPE"]
    folder = f"{data.rstrip('/')}/{source.name}"
    if not is_remote(folder):
        folder = os.path.join(os.path.dirname(output), folder)
    return " ".join([*words, "--output", shlex.quote(folder)])


def _argument(path: str) -> str | None:
    """Spell a path or pattern for a shell, so that import is given its files; None: it cannot."""
    if is_remote(path) and scheme_of(path) not in WRITABLE:
        return None
    parts = re.split(r"([*?\[\]]+)", path)
    if len(parts) == 1:
        return shlex.quote(path)
    folder = re.fullmatch(r"([^*?\[\]]*/)(\*\*/)?\*(\.npy)?", path)
    if folder and (is_remote(path) or folder[2]):
        return shlex.quote(folder[1])
    if is_remote(path) or "**" in path:
        return None
    return "".join(part if k % 2 else part and shlex.quote(part) for k, part in enumerate(parts))


def _number(value: Fraction) -> str:
    """Return a decimal number in full: every number of a file has one."""
    digits = 0
    while (value * 10**digits).denominator != 1:
        digits += 1
    whole = str(int(value * 10**digits)).rjust(digits + 1, "0")
    return f"{whole[:-digits]}.{whole[-digits:]}" if digits else whole
