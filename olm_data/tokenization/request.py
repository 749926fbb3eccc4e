"""What a tokenise run is asked for: source, tokenizer and the options that change bytes, as values.

    command line -> parse_budget -> Request -> plan

Never: writes, or looks at an output.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import msgspec

from olm_data.counts import parse_share
from olm_data.dataset.container import Container
from olm_data.dataset.inputs import InputFile
from olm_data.dataset.options import Last, Options, Settings, SpecialPolicy
from olm_data.dataset.plan import Plan, PlannedInput, likely_text, make_plan, shard_text
from olm_data.errors import InputError, UsageError, printable
from olm_data.sources import plan_units, resolve_source
from olm_data.sources.base import SourcePlan
from olm_data.sources.identical import identical_inputs
from olm_data.storage.names import is_unicode
from olm_data.storage.places import refuse_output
from olm_data.tokenizer.tokenizer import TokenizerSpec

DEFAULT_TOKENIZER = "gpt2"


@dataclass(frozen=True)
class BadBudget:
    """How many bad records a run accepts: a share of all records, or a count."""

    share: Fraction | None
    count: int

    def allows(self, bad: int, records: int) -> bool:
        """Whether `bad` of `records` is within the budget."""
        return bad <= (self.count if self.share is None else self.share * records)

    def __str__(self) -> str:
        return f"{self.count}" if self.share is None else f"{float(self.share * 100):g}%"


def parse_budget(text: str) -> BadBudget:
    """Return the budget that `0.1%` (a share) or `25` (a count) spells.

    Raises:
        UsageError: it is neither.
    """
    if text.endswith("%"):
        return BadBudget(parse_share(text, "--max-bad", allow_one=True), 0)
    if re.fullmatch(r"[0-9]{1,30}", text):
        return BadBudget(None, int(text))
    raise UsageError(
        f"--max-bad {text!r} is neither a count nor a percentage", fix="write 25 or 0.1%"
    )


@dataclass(frozen=True, kw_only=True)
class Base:
    """The dataset that new inputs are added to.

    Attributes:
        digest: of its newest version.
        number: of this addition, from 1.
        inputs: what it was made from, so that new inputs are numbered after them; never read.
        shards: how many shard names its plans have used.
    """

    digest: str
    number: int
    inputs: tuple[InputFile, ...]
    shards: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to make of which text. Everything that changes bytes is in here.

    Attributes:
        source: the inputs and how to read them.
        tokenizer: the tokenizer with its BOS and EOS rule.
        special: treatment of text that spells a special token.
        holdout: share of the documents that goes to the validation split.
        shard_tokens: wanted tokens a shard, or None for a size that fits the inputs.
        container: whether the tokens have a NumPy header.
        shuffle: seed of the order of the documents in each shard, or None for input order.
        dedup: keep only the first document in input order of each text.
        base: the dataset to add to, or None for a new one.
    """

    source: SourcePlan
    tokenizer: TokenizerSpec
    special: SpecialPolicy = "plain"
    holdout: Fraction = Fraction(0)
    shard_tokens: int | None = None
    container: Container = "npy"
    shuffle: int | None = None
    dedup: bool = False
    base: Base | None = None

    @property
    def inputs(self) -> tuple[InputFile, ...]:
        """All inputs of the dataset: of the base, then the new ones."""
        return self.source.inputs if self.base is None else self.base.inputs + self.source.inputs

    def options(self) -> Options:
        """Return the options that change bytes, for plans and manifests."""
        read, last = self.source.options, None
        if self.source.limit is not None:
            end = self.source.inputs[-1]
            last = Last(end.path, end.until, self.source.text_bytes)
        seed = read.seed if self.shuffle is None else self.shuffle
        return Options(
            **msgspec.structs.asdict(read) | {"seed": seed},
            holdout=str(self.holdout),
            limit=self.source.limit,
            last=last,
            container=self.container,
            dedup="exact" if self.dedup else None,
            shuffle_documents=self.shuffle is not None,
        )

    def plan(self) -> Plan:
        """Cut the inputs into units and group them into tasks.

        Raises:
            InputError: there is no input, or one is named twice.
        """
        inputs, first = self.inputs, 0 if self.base is None else len(self.base.inputs)
        new = self.source.inputs
        if not new:
            raise InputError("there is no input", fix="check the paths and patterns")
        twice = [path for path, n in Counter(item.path for item in inputs).items() if n > 1]
        if twice:
            raise InputError(
                "an input is named twice",
                where=twice[0],
                why="its documents would be in the dataset twice",
                fix="name each file once; to see text several times use max_epochs in the mixture",
            )
        for item in new:
            if not item.path.isprintable() and not is_unicode(item.path):
                raise InputError(
                    "the name of an input is not valid UTF-8",
                    where=printable(item.path),
                    why="manifests are JSON, which has no spelling for it",
                    fix="rename the file",
                )
        share = Fraction(self.source.options.sample or 1)
        text = self.source.text_bytes
        if text is None:
            text = int(likely_text([(i.path, i.bytes) for i in new]) * share)
        target = shard_text(text, self.shard_tokens)
        units = [
            msgspec.structs.replace(unit, bytes=max(int(unit.bytes * share), 1))
            for index, item in enumerate(new, first)
            for unit in plan_units(index, item, self.source.options, int(target / share))
        ]
        tokenizer, base = self.tokenizer, self.base
        settings = Settings(
            **msgspec.structs.asdict(self.options()),
            tokenizer=tokenizer.sha256,
            tokenizer_probe=tokenizer.probe_sha256,
            vocab_size=tokenizer.vocab_size,
            bos=tokenizer.bos,
            eos=tokenizer.eos,
            special=self.special,
            shard_text_bytes=target,
            parent=None if base is None else base.digest,
            first_shard=0 if base is None else base.shards,
        )
        planned = [
            PlannedInput(item.path, item.bytes, item.revision if i >= first else "", item.position)
            for i, item in enumerate(inputs)
        ]
        return make_plan(settings, planned, units, target)


def find_source(
    inputs: Sequence[str],
    *,
    tokenizer: str | None,
    output: str | None,
    source: str | None,
    keep: str | None,
    **reading: str | None,
) -> SourcePlan:
    """Return the source a command line names.

    Args:
        inputs, source: files, or a named source.
        tokenizer, output: as given; own files have no default for them.
        keep: names of columns, with commas.
        reading: the other arguments of `sources.resolve_source`.

    Raises:
        UsageError: options that are missing or do not go together.
        InputError: no such input or column.
    """
    require_own(inputs, tokenizer, output)
    if output is not None:
        refuse_output(output)
        _refuse_inside(inputs, output)
    names = None if keep is None else [name for name in keep.split(",") if name]
    return resolve_source(inputs, source=source, keep=names, **reading)


def require_own(inputs: Sequence[str], tokenizer: str | None, output: str | None) -> None:
    """Refuse own files without a tokenizer or an output, for which there is no default.

    Raises:
        UsageError: one of them is missing.
    """
    missing = [n for n, v in (("--tokenizer", tokenizer), ("--output", output)) if v is None]
    if inputs and missing:
        raise UsageError(
            f"for files of your own, give {' and '.join(missing)}",
            fix=f"olm-data tokenize {inputs[0]} --tokenizer {tokenizer or DEFAULT_TOKENIZER} "
            f"--output {output or './tokens/mine'}",
        )


def _refuse_inside(inputs: Sequence[str], output: str) -> None:
    """Refuse an output in a folder that is read: the next run would read its files as text."""
    place = os.path.realpath(output.removeprefix("file://"))
    for folder in filter(os.path.isdir, () if "://" in output else inputs):
        if os.path.commonpath([place, os.path.realpath(folder)]) == os.path.realpath(folder):
            raise UsageError(
                "the output lies in a folder of the inputs",
                where=printable(f"--output {output}"),
                why=f"the next run would read its files, too: {printable(folder)} is read whole",
                fix="name a folder beside it, or name the input files: "
                + printable(os.path.join(folder, "*.jsonl")),
            )


def refuse_identical(source: SourcePlan) -> None:
    """Refuse inputs with the same content under two names. Reads them where sizes are equal.

    Raises:
        InputError: there are such inputs; names both.
        StorageError: remote storage fails.
    """
    pairs = identical_inputs(source.inputs, source.options)
    if pairs:
        later, first = pairs[0]
        more = f", and {len(pairs) - 1:,} more pairs" if len(pairs) > 1 else ""
        raise InputError(
            "two inputs have the same content",
            where=printable(f"{first.path} and {later.path}{more}"),
            why="their documents would be in the dataset twice",
            fix="name one of them; or take both: --allow-duplicates",
        )


def default_output(source: SourcePlan, tokenizer: TokenizerSpec) -> str:
    """Return the output of a command that names none: `tokens/<source>-<tokenizer>`."""
    return str(Path("tokens") / f"{source.name}-{tokenizer.name}")
