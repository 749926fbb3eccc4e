"""What a run made, as values: what people are told, and the result that programs read.

manifests + FinishedShards -> Summary -> summary_text.summary_lines | RunResult (event `done`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from olm_data.dataset.account import BAD_REASONS, InputAccount, totals_by_input, unpack
from olm_data.dataset.manifest import Manifest
from olm_data.dataset.plan import Plan
from olm_data.dataset.tools import PassedCount
from olm_data.encoders import ParityReport
from olm_data.runners.base import Count
from olm_data.tokenization.quarantine import FOLDER
from olm_data.tokenization.request import Request
from olm_data.tokenization.shards import FinishedShards


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
