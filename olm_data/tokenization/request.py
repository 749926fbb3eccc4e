"""A recipe with what it names found: inputs, tokenizer, the records it selects; cut into a plan.

Recipe (+ BaseDataset: the dataset that it adds to) -> prepare -> Request -> plan
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import msgspec

from olm_data.counts import counted
from olm_data.dataset.inputs import InputFile, ReadOptions
from olm_data.dataset.options import Last, Settings
from olm_data.dataset.plan import Plan, PlannedInput, likely_text, make_plan, plan_name, shard_text
from olm_data.encoders import ParityReport, find_encoder
from olm_data.errors import InputError, UsageError, printable
from olm_data.extras import needs
from olm_data.sources import plan_units, read_units, resolve_source
from olm_data.sources.base import DocumentBatch, SourcePlan
from olm_data.sources.files import open_binary, reading
from olm_data.sources.passed import refuse_passed
from olm_data.sources.readers import chat_reader
from olm_data.storage.names import is_unicode
from olm_data.storage.output_paths import refuse_output
from olm_data.tokenization.base_dataset import BaseDataset
from olm_data.tokenization.decontaminate import EvalTexts, read_texts, stored_texts
from olm_data.tokenization.encoded_parts import LONG_TASK
from olm_data.tokenization.near_duplicates import parse_bands
from olm_data.tokenization.recipe import Recipe
from olm_data.tokenization.select_documents import record_options, select_documents
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer

DEFAULT_TOKENIZER = "gpt2"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to make of which text. Everything that changes bytes is in here.

    Attributes:
        recipe: what to do; `output` is filled in, and what the base decides.
        source: the inputs it names and how to read them.
        tokenizer: the tokenizer it names, with its BOS and EOS rule.
        base: the dataset to add to, or None for a new one.
        evaluated: texts that no document may share words in a row with, or None.
        plan: its inputs cut into units, and these grouped into tasks.
        notes: what the user should know before the work.
    """

    recipe: Recipe
    source: SourcePlan
    tokenizer: TokenizerSpec
    plan: Plan
    base: BaseDataset | None = None
    evaluated: EvalTexts | None = None
    notes: tuple[str, ...] = ()

    @property
    def output(self) -> str:
        """Folder or URL of the dataset."""
        assert self.recipe.output is not None
        return self.recipe.output

    @property
    def plan_name(self) -> str:
        """Name of the plan's file."""
        return plan_name(0 if self.base is None else self.base.version + 1)

    @property
    def inputs(self) -> tuple[InputFile, ...]:
        """All inputs of the dataset: of the base, then the new ones."""
        return self.source.inputs if self.base is None else self.base.inputs + self.source.inputs

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        source: SourcePlan,
        tokenizer: TokenizerSpec,
        *,
        base: BaseDataset | None = None,
        evaluated: EvalTexts | None = None,
        plan: Plan | None = None,
        notes: Sequence[str] = (),
    ) -> Request:
        """Plan the tasks, and test the search for evaluation texts.

        Args:
            plan: of another dataset, where it is that one's; None: it is made.

        Raises:
            InputError: there is no input, or one is named twice.
            ValidationError: the test fails.
        """
        tested = () if evaluated is None else (evaluated.self_test(),)
        plan = plan or _plan(recipe, source, tokenizer, base, evaluated)
        return cls(
            recipe=recipe,
            source=source,
            tokenizer=tokenizer,
            base=base,
            evaluated=evaluated,
            plan=plan,
            notes=(*notes, *tested, *_uncut(plan)),
        )

    def documents(self) -> Iterator[DocumentBatch]:
        """Yield the documents of the inputs, some megabytes of them at a time."""
        source = self.source
        read = read_units(self.inputs, self.plan.units, source.options, source.excluded)
        return (batch for batch in read if batch.documents)

    @cached_property
    def proof(self) -> ParityReport:
        """The encoder to use, and what is proved of it; asked for where there is work to do. See
        `encoders.find_encoder`."""
        recipe, chat = self.recipe, self.source.options.chat
        return find_encoder(
            recipe.encoder if chat is None else "hf",
            self.tokenizer,
            recipe.special,
            self.plan.all_text_bytes,
            ((batch.data, batch.offsets) for batch in self.documents()),
        )


def _uncut(plan: Plan) -> list[str]:
    """Say which input is one long task, as it cannot be cut."""
    whole = (unit for unit in plan.units if (unit.start, unit.stop) == (0, 1))
    long = [unit for unit in whole if unit.bytes > LONG_TASK]
    if not long:
        return []
    most = max(long, key=lambda unit: unit.bytes)
    return [
        f"{printable(plan.inputs[most.input].path)}: about {most.bytes / 1e9:,.0f} GB of text that "
        "cannot be cut: one process encodes it, and where it is killed the next one reads it from "
        f"its beginning ({counted(len(long), 'such input')}); several files, or one that is not "
        "compressed, are shared among processes"
    ]


def _plan(
    recipe: Recipe,
    source: SourcePlan,
    tokenizer: TokenizerSpec,
    base: BaseDataset | None,
    evaluated: EvalTexts | None,
) -> Plan:
    new, before = source.inputs, () if base is None else base.inputs
    inputs, first = (*before, *new), len(before)
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
                where=item.path,
                why="manifests are JSON, which has no spelling for it",
                fix="rename the file",
            )
    share = Fraction(source.options.sample or 1)
    text = source.text_bytes
    if text is None:
        text = int(likely_text([(i.path, i.bytes) for i in new]) * share)
    target = shard_text(text, recipe.shard_tokens)
    units = [
        msgspec.structs.replace(unit, bytes=max(int(unit.bytes * share), 1))
        for index, item in enumerate(new, first)
        for unit in plan_units(index, item, source.options, int(target / share))
    ]
    last = None if source.limit is None else Last(new[-1].path, new[-1].until, source.text_bytes)
    chosen = msgspec.structs.asdict(record_options(source.options)) | {"seed": recipe.seed}
    settings = Settings(
        **chosen,
        holdout=str(recipe.holdout),
        limit=source.limit,
        last=last,
        container=recipe.container,
        dedup=recipe.dedup,
        minhash=parse_bands(recipe.minhash) if recipe.dedup == "minhash" else None,
        decontaminate=None if evaluated is None else (evaluated.sha256, evaluated.n),
        shuffle_documents=recipe.shuffle_documents,
        tokenizer=tokenizer.sha256,
        tokenizer_probe=tokenizer.probe_sha256,
        vocab_size=tokenizer.vocab_size,
        bos=tokenizer.bos,
        eos=tokenizer.eos,
        special=recipe.special,
        shard_text_bytes=target,
        parent=None if base is None else base.digest,
        first_shard=None if base is None else base.shards,
    )
    planned = [
        PlannedInput(item.path, item.bytes, item.revision if i >= first else "", item.position)
        for i, item in enumerate(inputs)
    ]
    return make_plan(settings, planned, units, target)


def prepare(recipe: Recipe, inputs: Sequence[str], base: BaseDataset | None = None) -> Request:
    """Find what a recipe names: inputs, tokenizer, the records it selects.

    Args:
        inputs: those of the recipe, with a file in the place of standard input.
        base: a dataset to add to. Where its newest version is what the recipe adds to the one
            before, the request is for that version.

    Raises:
        UsageError: fields that are missing or do not go together.
        InputError: no such input or column, or one that `strict_inputs` refuses, or that the base
            has already.
    """
    if base is not None:
        recipe = base.complete(recipe)
    elif recipe.output is not None:
        refuse_output(recipe.output)
        _refuse_inside(inputs, recipe.output)
    source = resolve_source(msgspec.structs.replace(recipe, inputs=tuple(inputs)))
    if recipe.strict_inputs:
        refuse_passed(source.passed)
    if base is not None:
        return _addition(recipe, base.select(source), base)
    tokenizer = load_tokenizer(
        DEFAULT_TOKENIZER if recipe.tokenizer is None else recipe.tokenizer,
        eos=recipe.eos,
        bos=recipe.bos,
    )
    if source.options.chat is not None:
        source = source.reading(chat=chat_reader().options(recipe, tokenizer))
        tokenizer = tokenizer.delimited(eos=None, bos=None)  # the template writes them
    output = recipe.output
    if output is None:
        output = str(Path("tokens") / f"{source.name}-{tokenizer.name}")
        refuse_output(output)
    source = select_documents(
        source,
        exclude_ids=recipe.exclude_ids,
        sample=recipe.sample,
        seed=recipe.seed or 0,
        limit=recipe.limit,
        output=output,
    )
    if recipe.dedup == "minhash":
        with needs("--dedup minhash"):
            libraries = (*source.options.libraries, f"rensa {version('rensa')}")
        source = source.reading(libraries=libraries)
    recipe, evaluated = msgspec.structs.replace(recipe, output=output), None
    if recipe.decontaminate:
        evaluated = read_texts(recipe.decontaminate, recipe.decontaminate_ngram, tokenizer)
    return Request.of(recipe, source, tokenizer, evaluated=evaluated)


def _addition(recipe: Recipe, source: SourcePlan, base: BaseDataset) -> Request:
    evaluated = stored_texts(base.store, base.options.decontaminate)

    def on(version: BaseDataset) -> Request:
        named = version.named_apart(source)
        notes = tuple(
            f"{printable(old.path)} is the name of another input there; "
            f"this one is recorded as {printable(new.path)}"
            for old, new in zip(source.inputs, named.inputs, strict=True)
            if new.path != old.path
        )
        return Request.of(
            recipe, named, base.tokenizer, base=version, evaluated=evaluated, notes=notes
        )

    if base.before is not None:
        again = on(base.before)
        if again.plan.digest == base.manifest.additions[-1].plan:
            return again
    if not recipe.allow_duplicates:
        base.refuse_known(source)
    return on(base)


def require_own(recipe: Recipe) -> None:
    """Refuse own files without a tokenizer or an output, for which there is no default.

    Raises:
        UsageError: one of them is missing.
    """
    inputs, tokenizer, output = recipe.inputs, recipe.tokenizer, recipe.output
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
                where=f"--output {output}",
                why=f"the next run would read its files, too: {folder} is read whole",
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
            where=f"{first.path} and {later.path}{more}",
            why="their documents would be in the dataset twice",
            fix="name one of them; or take both: --allow-duplicates",
        )


EDGE_BYTES = 64 << 10
PIECE_BYTES = 4 << 20
READERS = 8


def identical_inputs(
    inputs: Sequence[InputFile], options: ReadOptions
) -> list[tuple[InputFile, InputFile]]:
    """Return (later, first) pairs of inputs whose bytes are the same.

    Raises:
        InputError: a file cannot be read.
        StorageError: remote storage fails.
    """
    chosen = [
        item
        for item in inputs
        if item.bytes > 0 and not (item.format == "txt" and options.separator is None)
    ]
    groups = _grouped([chosen], lambda item: item.bytes, map)
    with ThreadPoolExecutor(READERS) as pool:
        for key in (_digest, _edges):
            groups = _grouped(groups, key, pool.map)
        tagged = [group for group in groups if len({_tag(item) for item in group}) == 1]
        others = [group for group in groups if group not in tagged]
        groups = tagged + _grouped(others, _sha256, pool.map)
    position = {id(item): index for index, item in enumerate(inputs)}
    pairs = [(later, group[0]) for group in groups for later in group[1:]]
    return sorted(pairs, key=lambda pair: position[id(pair[0])])


def _grouped(
    groups: Iterable[list[InputFile]],
    key: Callable[[InputFile], Hashable],
    mapped: Callable[..., Iterable[Hashable]],
) -> list[list[InputFile]]:
    """Part each group by `key`, which `mapped` calls; groups of one are left out."""
    found = []
    for group in groups:
        parted: dict[Hashable, list[InputFile]] = defaultdict(list)
        for item, value in zip(group, mapped(key, group), strict=True):
            parted[value].append(item)
        found += [part for part in parted.values() if len(part) > 1]
    return found


def _digest(input: InputFile) -> str:
    """The digest the store has of the content, or "" where it has none that tells for certain.

    The hub's is one. An S3 ETag is not: of an object sent in parts, or encrypted, it is something
    else. It is never taken for a difference.
    """
    return input.revision if input.url.startswith("hf://") else ""


def _tag(input: InputFile) -> str:
    """A remote input's ETag or digest; equal size, edges and tag mean the same content."""
    tag = input.revision.rpartition("-")[0] if "://" in input.url else ""
    return tag or input.url


def _edges(input: InputFile) -> bytes:
    with reading(input), open_binary(input, ahead=False) as file:
        first = file.read(EDGE_BYTES)
        file.seek(max(0, input.bytes - EDGE_BYTES))
        return hashlib.sha256(first + file.read(EDGE_BYTES)).digest()


def _sha256(input: InputFile) -> bytes:
    digest = hashlib.sha256()
    with reading(input), open_binary(input) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.digest()
