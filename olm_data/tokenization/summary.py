"""What a run made, as values: what people are told, and the result that programs read.

manifests + FinishedShards -> Summary -> summary_lines | RunResult (event `done`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import msgspec
import numpy as np

from olm_data.counts import counted, duration, rates
from olm_data.dataset.account import (
    BAD_REASONS,
    DROP_REASONS,
    InputAccount,
    meaning,
    totals_by_input,
    unpack,
)
from olm_data.dataset.manifest import VALIDATION, Manifest
from olm_data.dataset.plan import Plan
from olm_data.dataset.tools import PassedCount
from olm_data.encoders import ParityReport
from olm_data.errors import printable
from olm_data.printing import record
from olm_data.runners.base import Count
from olm_data.sources.base import DocumentBatch, SourcePlan
from olm_data.sources.passed import passed_lines, tally
from olm_data.tokenization.quarantine import FOLDER
from olm_data.tokenization.request import Request
from olm_data.tokenization.shards import FinishedShards
from olm_data.tokenizer.tokenizer import TokenizerSpec


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run made.

    Attributes:
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
    def of_complete(cls, output: str, manifests: Sequence[Manifest], plan: Plan) -> Summary:
        """Return the summary of a run that found everything done."""
        train, validation = (*manifests, None)[:2]
        assert train is not None
        return cls(
            output=output,
            manifest=train,
            validation=validation,
            already_complete=True,
            kept_shards=len(plan.tasks),
        )

    @classmethod
    def of_shards(
        cls, request: Request, plan: Plan, manifests: Sequence[Manifest], shards: FinishedShards
    ) -> Summary:
        """Return the summary of a run that published `manifests`: train, then validation if any."""
        totals, excluded = totals_by_input(shards.accounts), request.source.excluded
        found = np.zeros(0 if excluded is None else len(excluded), bool)
        for account in shards.accounts:
            found |= unpack(account.excluded, len(found))
        return replace(
            cls.of_complete(request.output, manifests, plan),
            already_complete=False,
            kept_shards=shards.kept,
            proof=shards.proof,
            seconds=shards.seconds,
            documents_now=int(shards.counts[Count.DOCUMENTS]),
            text_bytes_now=int(shards.counts[Count.TEXT_BYTES]),
            tokens_now=int(shards.counts[Count.TOKENS]),
            by_reference=int(shards.counts[Count.BY_REFERENCE]),
            inputs={plan.inputs[index].path: account for index, account in totals.items()},
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
    """The event `done` of a run, and its keys; see docs/reference/cli.md and `Summary`."""

    output: str
    already_complete: bool
    digest: str
    tokens: int
    documents: int
    documents_in: int
    text_bytes: int
    shards: int
    dtype: str
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
    seconds: float
    text_bytes_now: int
    tokens_now: int
    kept_shards: int

    @classmethod
    def of(cls, summary: Summary) -> RunResult:
        """Return the result that a summary tells."""
        manifest, held, totals = summary.manifest, summary.validation, summary.manifest.totals
        copies, digest = manifest.tools.copies, str(manifest.digest)
        tokens, documents = summary.unknown
        validation = None
        if held is not None:
            validation = ValidationResult(
                digest=str(held.digest),
                tokens=held.totals.tokens,
                documents=held.totals.documents,
            )
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
            text_bytes_now=summary.text_bytes_now,
            tokens_now=summary.tokens_now,
            kept_shards=summary.kept_shards,
        )


def bad_records(dropped: dict[str, int]) -> int:
    """Return how many records were dropped as bad."""
    return sum(count for reason, count in dropped.items() if reason in BAD_REASONS)


SAMPLE_TEXT = 70
INPUTS_SHOWN = 10

_SPECIAL = {
    "plain": "were encoded as plain text",
    "allow": "became special tokens (--special allow)",
    "error": "were refused",
}


def rules(tokenizer: TokenizerSpec) -> str:
    """Return the BOS and EOS rule in words."""
    eos = "no EOS"
    if tokenizer.eos is not None:
        eos = f"EOS {tokenizer.eos_token} ({tokenizer.eos}) after each document"
    bos = "no BOS"
    if tokenizer.bos is not None:
        bos = f"BOS {tokenizer.bos_token} ({tokenizer.bos}) before each document"
    return f"{printable(eos)}, {printable(bos)}"


def plan_lines(
    request: Request, plan: Plan, sample: DocumentBatch | None, runner: str
) -> list[str]:
    """Return what a run would do, where (`runner`, in words), and its first documents."""
    inputs, tokenizer, recipe = request.source.inputs, request.tokenizer, request.recipe
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
        "not read": passed_lines(tally(request.source.passed)),
        **_selection(request.source),
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
        if likely and not _selection(request.source):
            facts["tokens"] = (
                f"some {likely:,}, {likely * tokenizer.dtype.itemsize:,} bytes on disk, if all "
                "text is as these documents"
            )
    return [f"would write {request.output}", *record(facts)]


def summary_lines(request: Request, summary: Summary, workers: int) -> list[str]:
    """Return what a run made, how fast, and what was dropped on the way."""
    manifest, held, source = summary.manifest, summary.validation, request.source
    totals, bad = manifest.totals, bad_records(manifest.dropped)
    validation = []
    if held is not None:
        validation = [f"{_size(held)}, in {summary.output}/{VALIDATION}"]
        if not held.totals.documents:
            validation.append(
                f"nothing is held out: {request.recipe.holdout} of "
                f"{counted(totals.documents, 'document')} came to none; give a larger --holdout, "
                "or cut .txt files into shorter documents with --separator"
            )
    facts: dict[str, object] = {
        "train": f"{_size(manifest)}, {manifest.dtype}",
        "validation": validation,
        "trained": manifest.trained is not None
        and f"{manifest.trained:,} tokens, {manifest.trained / max(totals.tokens, 1):.1%} of all",
        "cut": summary.cut and f"{counted(summary.cut, 'conversation')} lost turns to --max-tokens",
        **_versions(manifest),
        "tokenizer": f"{request.tokenizer.name}: {rules(request.tokenizer)}",
        "dropped": dropped_lines(manifest.dropped, totals.documents_in),
        "of inputs": input_lines(summary),
        "not read": passed_lines(tally(source.passed)),
        **_chosen(source, summary),
        "duplicates": duplicates(manifest, held),
        "replaced": summary.replaced
        and f"{counted(summary.replaced, 'document')} have U+FFFD for what was not UTF-8",
        "quarantine": bad
        and f"{counted(bad, 'record')} as they were read, in {summary.output}/{FOLDER}",
        "unknown": _unknown(request.tokenizer, summary),
        "special": summary.special_hits
        and f"{summary.special_hits:,} strings that spell a special token "
        + _SPECIAL[request.recipe.special],
    }
    if (proof := summary.proof) is not None:
        speed = rates(
            summary.documents_now, summary.text_bytes_now, summary.tokens_now, summary.seconds
        )
        kept = f"; {counted(summary.kept_shards, 'shard')} kept" if summary.kept_shards else ""
        by_hf = f"{counted(summary.by_reference, 'document')}: those that {proof.reasons}"
        facts |= {
            "encoder": f"{proof.encoder}: {proof.claim}",
            "by hf": by_hf if proof.reasons else "",
            "speed": f"{speed} in {duration(summary.seconds)}, {counted(workers, 'worker')}{kept}",
        }
    state = "already complete, nothing to do:" if summary.already_complete else "made"
    return [f"{state} {summary.output}", *record(facts)]


def _size(manifest: Manifest) -> str:
    totals = manifest.totals
    return (
        f"{totals.tokens:,} tokens in {counted(totals.documents, 'document')}, "
        f"{counted(len(manifest.shards), 'shard')}, digest {str(manifest.digest)[:16]}"
    )


def _unknown(tokenizer: TokenizerSpec, summary: Summary) -> str:
    """Return how much of the text became the unknown token; "" where nothing did."""
    tokens, documents = summary.unknown
    what, why = f"{tokens:,} characters left out", "the tokenizer has no token for them"
    if tokenizer.unk_token:
        what = f"{tokens:,} unknown tokens"
        why = f"{tokenizer.unk_token} ({tokenizer.unk}): the tokenizer does not know the text"
    said = f"{what} in {counted(documents, 'document')}: {why}; --on-unknown drop leaves such out"
    return said if tokens else ""


def dropped_lines(dropped: dict[str, int], records: int) -> list[str]:
    """Return each reason for which records were dropped, with its count and meaning."""
    return [
        f"{count:,} of {counted(records, 'record')}: {printable(reason)} ({meaning(reason)})"
        for reason, count in dropped.items()
    ] or [f"nothing of {counted(records, 'record')}"]


def _selection(source: SourcePlan) -> dict[str, object]:
    """Return what the user's selection takes; {} where it takes all."""
    options, said = source.options, dict[str, object]()
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


def _chosen(source: SourcePlan, summary: Summary) -> dict[str, object]:
    """Return how far each part of the selection reached."""
    options, dropped, said = source.options, summary.manifest.dropped, dict[str, object]()
    if source.excluded is not None and summary.ids_found is not None:
        missing = len(source.excluded) - summary.ids_found
        rest = f", {missing:,} belong to no record that came so far" if missing else ""
        said["exclude"] = f"{summary.ids_found:,} of {len(source.excluded):,} ids met{rest}"
    if options.sample is not None:
        before = ("filtered", "excluded", *DROP_REASONS)
        asked = summary.manifest.totals.documents_in - sum(dropped.get(r, 0) for r in before)
        got = asked - dropped.get("unsampled", 0)
        said["sample"] = (
            f"{_percent(Fraction(options.sample))} wanted, "
            f"{_percent(Fraction(got, max(asked, 1)))} drawn: {got:,} of "
            f"{counted(asked, 'document')} (each text by its hash, seed {options.seed})"
        )
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


def _versions(manifest: Manifest) -> dict[str, object]:
    """Return what a dataset's name is in any order of additions, and how it grew."""
    copies, said = manifest.tools.copies, dict[str, object]()
    if copies is not None and copies.content:
        said["content"] = f"{copies.content}: of the same texts in any order, files and shards"
    if manifest.additions:
        newest = manifest.additions[-1]
        shards = [shard for shard in manifest.shards if manifest.plan_of(shard.name) == newest.plan]
        said["version"] = (
            f"{len(manifest.additions) + 1}: "
            f"{counted(sum(shard.documents for shard in shards), 'document')}, "
            f"{sum(shard.tokens for shard in shards):,} tokens added to {newest.parent[:16]}, "
            "which stays readable; the digest keeps the order of additions, content does not"
        )
    return said


def duplicates(manifest: Manifest, validation: Manifest | None) -> str:
    """Return how many documents are exact copies of an earlier one; "" if unknown."""
    found = manifest.tools.copies
    documents = manifest.totals.documents + (validation.totals.documents if validation else 0)
    if found is None:
        return ""
    if not found.duplicates:
        return f"none among {counted(documents, 'document')}"
    return (
        f"{found.duplicates:,} of {counted(documents, 'document')} "
        f"({found.duplicates / documents:.1%}), {found.duplicate_bytes / 1e6:,.1f} MB of text; "
        "--dedup exact drops them"
    )


def input_lines(summary: Summary) -> list[str]:
    """Return where the records of each input went that lost any: the first ten of them."""
    lost = [(path, account) for path, account in summary.inputs.items() if account.dropped]
    lines = []
    for path, account in lost[:INPUTS_SHOWN]:
        parts = [f"{counted(account.documents + account.held_out, 'document')}"]
        parts += [f"{count:,} {reason}" for reason, count in sorted(account.dropped.items())]
        lines.append(f"{path}: {account.documents_in:,} = {' + '.join(parts)}")
    if len(lost) > INPUTS_SHOWN:
        lines.append(f"and {len(lost) - INPUTS_SHOWN:,} more inputs with drops")
    return lines
