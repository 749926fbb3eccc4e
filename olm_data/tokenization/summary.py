"""What a run made, as values: what people are told, and the result that programs read.

manifests + FinishedShards -> Summary -> RunResult, printed as lines or as the event `done`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

import msgspec
import numpy as np

from olm_data.counts import counted
from olm_data.dataset.account import BAD_REASONS, InputAccount, totals_by_input, unpack
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


@dataclass(frozen=True)
class Summary:
    """What a run made.

    Attributes:
        request: what was asked for.
        manifests: of the training split and, where documents are held out, of validation.
        shards: what the run wrote or found written; None where the dataset was there before it.
    """

    request: Request
    manifests: Sequence[Manifest]
    shards: FinishedShards | None = None

    @property
    def manifest(self) -> Manifest:
        """The manifest of the training split."""
        return self.manifests[0]

    @property
    def validation(self) -> Manifest | None:
        """The manifest of what is held out; None where nothing is."""
        return self.manifests[1] if len(self.manifests) > 1 else None

    @property
    def already_complete(self) -> bool:
        """Whether the dataset was there before the run."""
        return self.shards is None

    @property
    def kept_shards(self) -> int:
        """Tasks that an earlier run had finished."""
        return len(self.request.plan.tasks) if self.shards is None else self.shards.kept

    @cached_property
    def inputs(self) -> dict[str, InputAccount]:
        """What became of the records of each input, by its path; {} where `already_complete`."""
        totals = totals_by_input(() if self.shards is None else self.shards.accounts)
        return {self.request.plan.inputs[index].path: found for index, found in totals.items()}

    @property
    def ids_found(self) -> int | None:
        """How many of the ids of `--exclude-ids` some record had; None if not asked."""
        excluded = self.request.source.excluded
        if excluded is None or self.shards is None:
            return None
        found = np.zeros(len(excluded), bool)
        for account in self.shards.accounts:
            found |= unpack(account.excluded, len(found))
        return int(found.sum())

    def now(self, count: Count) -> int:
        """Return what this run has counted, in shards found done not."""
        return 0 if self.shards is None else int(self.shards.counts[count])

    def total(self, name: str) -> int:
        """Return the sum of one of the `NUMBERS` of an account over the inputs."""
        return sum(getattr(account, name) for account in self.inputs.values())


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
        tokens = summary.total("unknown_tokens")
        seconds = 0.0 if summary.shards is None else summary.shards.seconds
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
            output=request.output,
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
            cut=summary.total("cut"),
            selection=selection(request.source),
            dropped=manifest.dropped,
            passed_over=manifest.tools.passed_over,
            duplicates=copies.duplicates if copies else msgspec.UNSET,
            duplicate_bytes=copies.duplicate_bytes if copies else msgspec.UNSET,
            content=copies.content if copies else msgspec.UNSET,
            versions=[*(item.parent for item in manifest.additions), digest],
            quarantine=f"{request.output}/{FOLDER}"
            if BAD_REASONS & manifest.dropped.keys()
            else None,
            replaced=summary.total("replaced"),
            unknown_tokens=tokens,
            unknown_documents=summary.total("unknown_documents"),
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
            special_hits=summary.total("special_hits"),
            ids_found=summary.ids_found,
            encoder=None if summary.already_complete else request.proof,
            by_reference=summary.now(Count.BY_REFERENCE),
            seconds=round(seconds, 3),
            text_bytes_per_second=round(summary.now(Count.TEXT_BYTES) / max(seconds, 1e-9)),
            text_bytes_now=summary.now(Count.TEXT_BYTES),
            tokens_now=summary.now(Count.TOKENS),
            kept_shards=summary.kept_shards,
            workers=workers,
            notes=notes,
        )


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
        said["sample"] = f"{float(Fraction(options.sample) * 100):.4g}%, seed {options.seed}"
    if source.limit is not None:
        most, last = counted(source.limit, "document"), source.inputs[-1]
        end = f"up to {printable(last.path)}, {last.position} {last.until}"
        said["limit"] = f"{most}, {'more than there are' if last.until is None else end}"
    return said
