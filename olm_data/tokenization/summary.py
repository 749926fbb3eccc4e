"""What a run made, as values: what people are told, and the result that programs read.

manifests + FinishedShards -> Summary -> RunResult, printed as lines or as the event `done`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar

import msgspec
import numpy as np

from olm_data.counts import counted
from olm_data.dataset.account import (
    BAD_REASONS,
    InputAccount,
    totals_by_input,
    unpack,
)
from olm_data.dataset.manifest import Manifest
from olm_data.dataset.tools import PassedCount
from olm_data.encoders import ParityReport
from olm_data.errors import printable
from olm_data.printing import Columns, Seconds, record
from olm_data.runners.base import Count
from olm_data.sources.base import DocumentBatch, SourcePlan
from olm_data.sources.passed import passed_lines
from olm_data.tokenization.quarantine import FOLDER
from olm_data.tokenization.request import Request
from olm_data.tokenization.shards import FinishedShards
from olm_data.tokenizer.tokenizer import TokenizerSpec

INPUTS_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run made.

    Attributes:
        request: what was asked for.
        output: where the dataset is.
        manifest, validation: the manifests; validation is None where nothing was held out.
        already_complete: the dataset was there before the run.
        kept_shards: tasks that an earlier run had finished.
        proof: the encoder used and what is proved of it; None where nothing was encoded.
        seconds: wall time of the tasks.
        documents_now, text_bytes_now, tokens_now: done by this run, shards found done not counted.
        by_reference: documents encoded by `hf` in this run, as nothing is proved of the encoder
            for them.
        inputs: what became of the records of each input, by its path; empty where
            `already_complete`.
        ids_found: how many of the ids of `--exclude-ids` some record had; None if not asked.
    """

    request: Request
    output: str
    manifest: Manifest
    validation: Manifest | None
    already_complete: bool
    kept_shards: int
    proof: ParityReport | None = None
    seconds: float = 0.0
    documents_now: int = 0
    text_bytes_now: int = 0
    tokens_now: int = 0
    by_reference: int = 0
    inputs: Mapping[str, InputAccount] = field(default_factory=dict)
    ids_found: int | None = None

    @classmethod
    def of_complete(cls, request: Request, manifests: Sequence[Manifest]) -> Summary:
        """Return the summary of a run that found everything done."""
        train, validation = (*manifests, None)[:2]
        assert train is not None
        return cls(
            request=request,
            output=request.output,
            manifest=train,
            validation=validation,
            already_complete=True,
            kept_shards=len(request.plan.tasks),
        )

    @classmethod
    def of_shards(
        cls, request: Request, manifests: Sequence[Manifest], shards: FinishedShards
    ) -> Summary:
        """Return the summary of a run that published `manifests`: train, then validation if any."""
        totals, excluded = totals_by_input(shards.accounts), request.source.excluded
        found = np.zeros(0 if excluded is None else len(excluded), bool)
        for account in shards.accounts:
            found |= unpack(account.excluded, len(found))
        return replace(
            cls.of_complete(request, manifests),
            already_complete=False,
            kept_shards=shards.kept,
            proof=request.proof,
            seconds=shards.seconds,
            documents_now=int(shards.counts[Count.DOCUMENTS]),
            text_bytes_now=int(shards.counts[Count.TEXT_BYTES]),
            tokens_now=int(shards.counts[Count.TOKENS]),
            by_reference=int(shards.counts[Count.BY_REFERENCE]),
            inputs={request.plan.inputs[index].path: account for index, account in totals.items()},
            ids_found=None if excluded is None else int(found.sum()),
        )

    @property
    def special_hits(self) -> int:
        """Strings in the text that spell a special token."""
        return sum(account.special_hits for account in self.inputs.values())

    @property
    def replaced(self) -> int:
        """Documents with U+FFFD for what was not UTF-8."""
        return sum(account.replaced for account in self.inputs.values())

    @property
    def cut(self) -> int:
        """Documents that were cut for their length."""
        return sum(account.cut for account in self.inputs.values())

    @property
    def unknown(self) -> tuple[int, int]:
        """Unknown tokens, and the documents that have some."""
        accounts = self.inputs.values()
        return (
            sum(account.unknown_tokens for account in accounts),
            sum(account.unknown_documents for account in accounts),
        )


class DroppedOfInput(msgspec.Struct, frozen=True, kw_only=True):
    """An input that lost records, in the result of a run."""

    path: str
    records: int
    documents: int
    dropped: dict[str, int]


class ValidationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The validation split, in the result of a run."""

    digest: str
    tokens: int
    documents: int


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a run made, and the event `done`; see docs/reference/cli.md and `Summary`.

    Attributes:
        tokenizer: its name and where it puts ids at the ends of a document.
        trained: tokens that are trained, where not all are.
        cut: conversations that lost turns to `--max-tokens`.
        selection: what was asked for of the records.
        notes: what to do about some of the numbers.
        workers: how many tasks at a time.
    """

    COLUMNS: ClassVar = {
        "inputs_with_drops": Columns(most=INPUTS_SHOWN),
        **dict.fromkeys(("versions", "text_bytes_now", "tokens_now")),
    }

    output: str
    already_complete: bool
    digest: str
    tokens: int
    documents: int
    documents_in: int
    text_bytes: int
    shards: int
    dtype: str
    tokenizer: str
    trained: int | None
    cut: int
    selection: dict[str, str]
    dropped: dict[str, int]
    passed_over: dict[str, PassedCount]
    duplicates: int | msgspec.UnsetType
    duplicate_bytes: int | msgspec.UnsetType
    content: str | msgspec.UnsetType | None
    versions: list[str]
    quarantine: str | None
    replaced: int
    unknown_tokens: int
    unknown_documents: int
    inputs_with_drops: list[DroppedOfInput]
    validation: ValidationResult | None
    special_hits: int
    ids_found: int | None
    encoder: ParityReport | None
    by_reference: int
    seconds: Seconds
    text_bytes_per_second: int
    text_bytes_now: int
    tokens_now: int
    kept_shards: int
    workers: int
    notes: list[str]

    @classmethod
    def of(cls, summary: Summary, workers: int = 0) -> RunResult:
        """Return the result that a summary tells."""
        manifest, held, totals = summary.manifest, summary.validation, summary.manifest.totals
        copies, digest = manifest.tools.copies, str(manifest.digest)
        tokens, documents = summary.unknown
        request, validation, notes = summary.request, None, list[str]()
        if held is not None:
            validation = ValidationResult(
                digest=str(held.digest),
                tokens=held.totals.tokens,
                documents=held.totals.documents,
            )
            if not held.totals.documents:
                notes.append(
                    f"nothing is held out: {request.recipe.holdout} of "
                    f"{counted(totals.documents, 'document')} came to none; give a larger "
                    "--holdout, or cut .txt files into shorter documents with --separator"
                )
        if tokens:
            notes.append("the tokenizer does not know some text; --on-unknown drop leaves it out")
        if copies and copies.duplicates:
            notes.append("--dedup exact drops the duplicates")
        return cls(
            output=summary.output,
            already_complete=summary.already_complete,
            digest=digest,
            tokens=totals.tokens,
            documents=totals.documents,
            documents_in=totals.documents_in,
            text_bytes=totals.text_bytes,
            shards=len(manifest.shards),
            dtype=manifest.dtype,
            tokenizer=f"{request.tokenizer.name}: {rules(request.tokenizer)}",
            trained=manifest.trained,
            cut=summary.cut,
            selection=selection(request.source),
            dropped=manifest.dropped,
            passed_over=manifest.tools.passed_over,
            duplicates=copies.duplicates if copies else msgspec.UNSET,
            duplicate_bytes=copies.duplicate_bytes if copies else msgspec.UNSET,
            content=copies.content if copies else msgspec.UNSET,
            versions=[*(item.parent for item in manifest.additions), digest],
            quarantine=f"{summary.output}/{FOLDER}" if bad_records(manifest.dropped) else None,
            replaced=summary.replaced,
            unknown_tokens=tokens,
            unknown_documents=documents,
            inputs_with_drops=[
                DroppedOfInput(
                    path=path,
                    records=account.documents_in,
                    documents=account.documents + account.held_out,
                    dropped=dict(sorted(account.dropped.items())),
                )
                for path, account in summary.inputs.items()
                if account.dropped
            ],
            validation=validation,
            special_hits=summary.special_hits,
            ids_found=summary.ids_found,
            encoder=summary.proof,
            by_reference=summary.by_reference,
            seconds=round(summary.seconds, 3),
            text_bytes_per_second=round(summary.text_bytes_now / max(summary.seconds, 1e-9)),
            text_bytes_now=summary.text_bytes_now,
            tokens_now=summary.tokens_now,
            kept_shards=summary.kept_shards,
            workers=workers,
            notes=notes,
        )


def bad_records(dropped: dict[str, int]) -> int:
    """Return how many records were dropped as bad."""
    return sum(count for reason, count in dropped.items() if reason in BAD_REASONS)


SAMPLE_TEXT = 70


def rules(tokenizer: TokenizerSpec) -> str:
    """Return the BOS and EOS rule in words."""
    eos = "no EOS"
    if tokenizer.eos is not None:
        eos = f"EOS {tokenizer.eos_token} ({tokenizer.eos}) after each document"
    bos = "no BOS"
    if tokenizer.bos is not None:
        bos = f"BOS {tokenizer.bos_token} ({tokenizer.bos}) before each document"
    return f"{printable(eos)}, {printable(bos)}"


def plan_lines(request: Request, sample: DocumentBatch | None, runner: str) -> list[str]:
    """Return what a run would do, where (`runner`, in words), and its first documents."""
    inputs, tokenizer, recipe = request.source.inputs, request.tokenizer, request.recipe
    plan = request.plan
    last = f" to {inputs[-1].path}" if len(inputs) > 1 else ""
    facts: dict[str, object] = {
        "inputs": f"{counted(len(inputs), 'file')}, {sum(i.bytes for i in inputs):,} bytes: "
        f"{inputs[0].path}{last}",
        "shards": f"{len(plan.tasks):,}, about "
        f"{plan.all_text_bytes // max(len(plan.tasks), 1):,} bytes of text each",
        "tokenizer": f"{tokenizer.name}, {counted(tokenizer.vocab_size, 'entry')}, "
        f"{tokenizer.dtype.name} on disk",
        "ends": rules(tokenizer),
        "holdout": f"{recipe.holdout or 'none'}",
        "not read": passed_lines(request.source.passed),
        **selection(request.source),
        "decontaminate": request.evaluated and str(request.evaluated),
        "shuffle": None if recipe.shuffle is None else f"documents, seed {recipe.shuffle}",
        "runner": runner,
        "plan": plan.digest,
    }
    if sample is not None:
        taken = size = 0
        for k in range(min(3, sample.documents)):
            text = sample.text(k)[:100_000]
            ids = len(tokenizer.encode(text))
            taken, size = taken + ids, size + len(text.encode())
            facts[f"document {k}"] = (
                f"{sample.text_bytes[k]:,} bytes, {ids:,} tokens: {printable(text[:SAMPLE_TEXT])}"
            )
        likely = plan.all_text_bytes * taken // size
        if likely and not selection(request.source):
            facts["tokens"] = (
                f"some {likely:,}, {likely * tokenizer.dtype.itemsize:,} bytes on disk, if all "
                "text is as these documents"
            )
    return [f"would write {request.output}", *record(facts)]


def selection(source: SourcePlan) -> dict[str, str]:
    """Return what the user's selection takes; {} where it takes all."""
    options, said = source.options, dict[str, str]()
    if options.where is not None:
        said["where"] = options.where
    if options.filter is not None:
        said["filter"] = options.filter.path
    if source.excluded is not None:
        said["exclude"] = f"{len(source.excluded):,} ids"
    if options.sample is not None:
        said["sample"] = f"{_percent(Fraction(options.sample))}, seed {options.seed}"
    if source.limit is not None:
        said["limit"] = _limit(source)
    return said


def _percent(share: Fraction) -> str:
    return f"{float(share * 100):.4g}%"


def _limit(source: SourcePlan) -> str:
    most, last = counted(source.limit or 0, "document"), source.inputs[-1]
    if last.until is None:
        return f"{most}, more than there are"
    return f"{most}, up to {printable(last.path)}, {last.position} {last.until}"
