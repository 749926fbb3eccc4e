"""`olm-data verify`: prove that a dataset, or every dataset of a lock, is what its digests say.

    manifest -> each shard (shard.py) -> manifest rebuilt from the records and compared
             -> plan and accounts of inputs -> tokenizer -> round trip of a sample of documents
             -> with `deep`: a sample against the original text (deep.py)

Each disagreement is a `Finding` (file, field, expected, found) and checking goes on, so that one
run lists them all. Reads every byte once, in bounded pieces, on all granted cores (hashing lets
other threads run), or with `sample` a part of them (sample.py). Never writes.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from olm_data.bounded_json import MalformedJson
from olm_data.counts import counted
from olm_data.dataset.account import InputAccount
from olm_data.dataset.arrived import input_totals
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.job import JobFile
from olm_data.dataset.manifest import (
    JOB,
    MANIFEST,
    VALIDATION,
    Manifest,
    build_manifest,
    decode_manifest,
    read_manifest,
    version_name,
)
from olm_data.dataset.plan import Plan, plan_digests, plan_name
from olm_data.dataset.record import RECORD, Blocks, ShardRecord
from olm_data.dataset.target import dataset_root, is_lock
from olm_data.dataset.tokenizer import TOKENIZER, spec_of
from olm_data.dataset.tools import Tools
from olm_data.encoders import make_encoder
from olm_data.encoders.base import concatenate
from olm_data.errors import InputError, OlmError, StorageError, ValidationError, printable
from olm_data.extensions.verify.shard import (
    Meter,
    SamplePlan,
    ShardResult,
    VerifyReport,
    check_shard,
    read_or_report,
    same_bytes,
)
from olm_data.extras import MissingExtra
from olm_data.packing.row_plan import PlanInfo
from olm_data.runners.local import granted_cpus
from olm_data.storage.store import Store, is_remote, read_json
from olm_data.threads import in_order
from olm_data.tokenizer.tokenizer import TokenizerSpec

if TYPE_CHECKING:
    from olm_data.extensions.verify.deep import Deep


REMOTE_THREADS = 16
SAMPLE_DOCUMENTS = 64
SAMPLE_BYTES = 1 << 20  # longer documents are left out of the round trip


@dataclass(frozen=True, kw_only=True)
class Scope:
    """How much to look at.

    Attributes:
        sample: share of the token blocks to read, or None for every byte.
        seed: which blocks.
        deep: what to compare with the original text, or None.
        meter: counts the bytes read.
    """

    sample: Fraction | None
    seed: int
    deep: Deep | None
    meter: Meter


def verify(
    target: str,
    *,
    sample: Fraction | None = None,
    seed: int = 0,
    deep: Deep | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Verify a dataset (folder or URL) or a mixture lock (a `.json` file).

    Args:
        sample: share of the token blocks to read, above 0; None and 1 read every byte.
        seed: which blocks a sample takes.
        deep: also compare with the original text, as it says.
        watch: called with (bytes of tokens read, bytes in all), from many threads, one at a time.

    Raises:
        InputError: there is nothing of the kind at `target`.
        UsageError: `deep` is asked for and nothing tells where the original text is.
    """
    start = time.monotonic()
    sample = None if sample == 1 else sample
    report = VerifyReport(target=target, sample=None if sample is None else str(sample))
    scope = Scope(sample=sample, seed=seed, deep=deep, meter=Meter(watch))
    if is_lock(target):
        _verify_lock(target, report, scope)
    else:
        scope.meter.total = _planned(Store(dataset_root(target)), None, sample)
        _verify_dataset(Store(dataset_root(target)), report, scope, top=True)
    report.seconds = time.monotonic() - start
    return report


def _verify_lock(target: str, report: VerifyReport, scope: Scope) -> None:
    from olm_data.mixture.lock import Lock

    if not is_remote(target) and not Path(target).is_file():
        raise InputError(
            "there is no lock file here", where=target, fix="olm-data mix manifest.yaml"
        )
    try:
        lock = Lock.read(target)
        datasets = lock.open_datasets(verify="off")
    except (StorageError, MissingExtra):  # they say nothing about the bytes
        raise
    except OlmError as error:
        report.add(error.where or target, "lock", "a lock that matches its datasets", error.what)
        return
    scope.meter.total = sum(_planned(item.store, item.digest, scope.sample) for item in datasets)
    for dataset in datasets:
        _verify_dataset(dataset.store, report, scope, top=False, digest=dataset.digest)
    for source in lock.sources:
        if source.view is not None:
            report.notes.append(
                f"source {source.name} draws on {source.view.documents:,} of "
                f"{counted(source.documents, 'document')}: "
                + (f"those of lock {source.like.lock[:12]}" if source.like else f"{source.view}")
            )
        if source.plan is not None:
            _verify_row_plan(Store(lock.folder).child(source.plan.folder), source.plan, report)


def _verify_row_plan(store: Store, plan: PlanInfo, report: VerifyReport) -> None:
    for name, size in plan.sizes.items():
        with report.unreadable(store.url(name)):
            same_bytes(store, name, size, plan.sha256[name], report)


def _has_validation(manifest: Manifest) -> bool:
    """Whether a split was held out: the child itself was not split again."""
    options = manifest.tokenized
    return options is not None and options.split == "train" and options.holdout_below > 0


def _planned(
    store: Store, digest: str | None, sample: Fraction | None, *, nested: bool = True
) -> int:
    """Return about how many bytes of tokens will be read, for showing how far it is."""
    try:
        manifest = read_manifest(store, digest)
    except OlmError:
        return 0  # the check itself says what is wrong
    total = sum(manifest.tokens_bytes(shard) for shard in manifest.shards)
    if sample is not None:
        total = min(total, SamplePlan(manifest, sample, 0).bytes)
    if nested and _has_validation(manifest):
        total += _planned(store.child(VALIDATION), None, sample, nested=False)
    return total


def _verify_dataset(
    store: Store,
    report: VerifyReport,
    scope: Scope,
    *,
    top: bool,
    digest: str | None = None,
    split: str = "train",
) -> None:
    """Verify the version of `digest` of a dataset, or its newest."""
    try:
        manifest = read_manifest(store, digest)
    except InputError:
        if top:
            raise
        report.add(store.url(MANIFEST), "file", "a manifest", "nothing")
        return
    except (StorageError, MissingExtra):
        raise
    except OlmError as error:
        report.add(store.url(MANIFEST), "content", "an unchanged manifest", error.what)
        return
    report.datasets.append((store.root, str(manifest.digest)))
    if split == VALIDATION:
        report.add(store.url(MANIFEST), "split", split, manifest.split)
    results = _check_shards(store, manifest, report, scope)
    inside = 0
    for result in results:
        report.include(result.report.findings)
        inside += result.eos_inside
    if inside:
        report.notes.append(
            f"{inside:,} EOS ids stand inside documents; borders come from ends, never from EOS"
        )
    report.shards += len(manifest.shards)
    report.tokens += manifest.totals.tokens
    report.documents += manifest.totals.documents
    if all(result.record for result in results):
        _check_manifest(store, manifest, [r.record for r in results if r.record], report)
    check_plans(store, manifest, report, _threads(store))
    check_job(store, manifest, report)
    check_versions(store, manifest, report)
    spec = _check_tokenizer(store, manifest, report)
    if spec is not None and not report.findings:
        _round_trip(Dataset(store, manifest), spec, report)
        if scope.deep is not None and manifest.split == "train":
            from olm_data.extensions.verify.deep import (
                check_deep,  # the readers of all formats, for this alone
            )

            check_deep(Dataset(store, manifest), spec, scope.deep, report)
    if split == "train" and _has_validation(manifest):
        child = store.child(VALIDATION)
        if not child.exists(MANIFEST):
            report.add(child.url(MANIFEST), "file", "the validation split", "nothing")
            return
        _verify_dataset(child, report, scope, top=False, split=VALIDATION)


def _check_shards(
    store: Store, manifest: Manifest, report: VerifyReport, scope: Scope
) -> list[ShardResult]:
    """Check all shards, or a sample, on all cores; add the bytes read to the report."""
    total = sum(manifest.tokens_bytes(shard) for shard in manifest.shards)
    plan = None if scope.sample is None else SamplePlan(manifest, scope.sample, scope.seed)
    before, start = scope.meter.read, time.monotonic()

    def check(index: int) -> ShardResult:
        info = manifest.shards[index]
        pieces, whole = (plan.pieces[index], plan.whole[index]) if plan else (None, True)
        result = check_shard(store, manifest, info, scope.meter.seen, pieces, whole=bool(whole))
        if result.record is not None:  # checksums of blocks are most of a record: not kept
            record = msgspec.structs.replace(result.record[0], blocks=Blocks(0, ""), units=[])
            result.record = (record, result.record[1])
        return result

    results = list(in_order(check, range(len(manifest.shards)), _threads(store)))
    read = scope.meter.read - before
    report.bytes_read += read
    report.read_seconds += time.monotonic() - start
    if plan is not None:
        report.unread_bytes += total - read
        shards, whole = len(manifest.shards), int(plan.whole.sum())
        rest = ""
        if whole < shards or read < total:
            rest = "; of the rest only presence and size were checked"
        report.notes.append(
            f"a sample (seed {scope.seed}) of {printable(store.root)}: read {read:,} of "
            f"{total:,} bytes of tokens, ends and document rows of {whole:,} of {shards:,} "
            f"shards{rest}"
        )
    return results


def _threads(store: Store) -> int:
    """Hashing keeps a core busy; a remote store is mostly waited for."""
    return max(granted_cpus(), REMOTE_THREADS) if store.remote else granted_cpus()


def _check_manifest(
    store: Store, manifest: Manifest, records: list[tuple[ShardRecord, str]], report: VerifyReport
) -> None:
    """Rebuild the manifest from the commit records and compare what is derived from them."""
    url = store.url(MANIFEST)
    rebuilt = build_manifest(
        tokenizer=manifest.tokenizer,
        dtype=np.dtype(manifest.dtype),
        options=manifest.options,
        plan=manifest.plan,
        inputs=manifest.inputs,
        records=records,
        dropped=manifest.dropped,
        documents_in=manifest.totals.documents_in,
        tools=Tools(),
        added=manifest.additions,
        container=manifest.container,
        files={info.name: info.file for info in manifest.shards if info.file},
    )
    for name in ("shards", "totals", "max_documents_in"):
        report.add(url, name, getattr(rebuilt, name), getattr(manifest, name))
    report.add(
        url,
        "documents_in",
        manifest.totals.documents_in,
        sum(item.documents for item in manifest.inputs),
    )


def _check_tokenizer(
    store: Store, manifest: Manifest, report: VerifyReport
) -> TokenizerSpec | None:
    url, data = store.url(TOKENIZER), read_or_report(store, TOKENIZER, report)
    if data is None:
        return None
    digest = hashlib.sha256(data).hexdigest()
    report.add(url, "sha256", manifest.tokenizer.sha256, digest)
    if digest != manifest.tokenizer.sha256:
        return None
    spec = spec_of(data, manifest.tokenizer, url, TOKENIZER)
    report.add(url, "ids of the probe text", manifest.tokenizer.probe_sha256, spec.probe_sha256)
    report.add(url, "vocab_size", manifest.tokenizer.vocab_size, spec.vocab_size)
    return spec


def _round_trip(dataset: Dataset, spec: TokenizerSpec, report: VerifyReport) -> None:
    """Decode a sample of documents, compare the text's hash, encode it again, compare the ids."""
    if dataset.manifest.tokenized is None:
        report.notes.append("round trip not checked: an imported dataset does not know its text")
        return
    if dataset.manifest.trained is not None:
        report.notes.append("round trip not checked: the text of a chat is not what it decodes to")
        return
    if not spec.lossless:
        report.notes.append(
            f"round trip not checked: the tokenizer {printable(spec.name)} normalises text, so ids "
            "do not decode to the text they came from"
        )
        return
    rules = dataset.manifest.tokenizer
    # text that spells a special token would be damage, which the comparison of the ids finds
    encoder = make_encoder("hf", spec, "allow" if rules.special == "allow" else "plain")
    count = min(SAMPLE_DOCUMENTS, dataset.documents)
    for number in np.linspace(0, dataset.documents - 1, count).astype(int) if count else ():
        try:
            if dataset.origin(int(number)).text_bytes > SAMPLE_BYTES:
                continue
            document = dataset.document(int(number))
        except ValidationError as error:  # damage that a sample of the blocks did not meet
            report.add(error.where or dataset.store.root, "content", "unchanged", error.what)
            continue
        ids = rules.body(document.tokens)
        where = f"{dataset.store.root} document {number}"
        try:
            text = spec.decode(ids)
        except InputError as error:
            report.add(where, "tokens", "ids that decode", error.why)
            continue
        size = len(text.encode())
        report.add(where, "bytes of decoded text", document.text_bytes, size)
        again = encoder.encode(*concatenate([text.encode()])).ids
        if not np.array_equal(again, ids):
            report.add(where, "round trip", f"{len(ids)} ids", f"{len(again)} other ids")
        report.round_trip += 1


def check_versions(store: Store, manifest: Manifest, report: VerifyReport) -> None:
    """Compare a manifest with those of the versions before it: each is the beginning of the next.

    The shards, inputs and options of a version are the first ones of the version after it.
    """
    after = manifest
    for addition in reversed(manifest.additions):
        name = version_name(addition.parent)
        url = store.url(name)
        try:
            before = decode_manifest(read_json(store, name), url)
        except FileNotFoundError:
            report.add(url, "history", "the manifest of an earlier version", "nothing")
            return
        except (OlmError, MalformedJson) as error:
            said = error.what if isinstance(error, OlmError) else error
            report.add(url, "history", "an unchanged manifest", said)
            return
        for what, wanted, found in (
            ("digest", addition.parent, before.digest),
            ("tokenizer", after.tokenizer, before.tokenizer),
            ("options", after.stored_options, before.stored_options),
            ("plan", after.plan, before.plan),
            ("shards", after.shards[: len(before.shards)], before.shards),
            ("inputs", after.inputs[: addition.first_input], before.inputs),
            ("additions", after.additions[:-1], before.additions),
        ):
            report.add(f"{url} {what}", "history", wanted, found)
        after = before


_PLAN_FILE = re.compile(r"plan-(\d{5,9})\.json")


def check_plans(store: Store, manifest: Manifest, report: VerifyReport, threads: int) -> None:
    """Compare with the plans, and the account of inputs with the records of all their tasks."""
    if manifest.split != "train":
        return
    names: list[str] = []
    for number, digest in enumerate(plan_digests(manifest)):
        plan = _check_plan(store, plan_name(number), digest, report)
        if plan is None:
            return
        names += plan.shards

    def accounts_of(shard: str) -> tuple[VerifyReport, list[InputAccount]]:
        own, name = VerifyReport(target=store.root), shard + RECORD
        data = read_or_report(store, name, own)
        try:
            return own, [] if data is None else ShardRecord.parse(data).accounts
        except MalformedJson as error:
            own.add(store.url(name), "content", "a commit record", error)
            return own, []

    read = list(in_order(accounts_of, names, threads))
    for own, _ in read:
        report.include(own.findings)
    if any(own.findings for own, _ in read):
        return  # without all records, no sum can be right
    summed = input_totals(manifest.inputs, [account for _, every in read for account in every])
    for item, wanted in zip(manifest.inputs, summed, strict=True):
        where = f"{store.url(MANIFEST)} input {item.path}"
        report.add(where, "documents", wanted.documents, item.documents)
        report.add(where, "sha256", wanted.sha256, item.sha256)


def _check_plan(store: Store, name: str, digest: str, report: VerifyReport) -> Plan | None:
    """Return a plan whose digest is right; its spelling must be the one it was written in.

    The digest leaves out when each input was last changed: `check_job` covers that.
    """
    url, data = store.url(name), read_or_report(store, name, report)
    if data is None:
        return None
    try:
        plan = Plan.decode(data)
        report.add(url, "content", "as it was written", _spelling(plan.encode(), data))
    except MalformedJson as error:
        report.add(url, "content", "a plan", error)
        return None
    report.add(url, "digest", digest, plan.digest)
    return plan if plan.digest == digest else None


def _spelling(wanted: bytes, found: bytes) -> str:
    if wanted == found:
        return "as it was written"
    pairs = zip(wanted, found, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(found)))
    return f"changed at byte {first:,}"


def check_job(store: Store, manifest: Manifest, report: VerifyReport) -> None:
    """Compare `job.json` with its own digest, and with the plan file that it belongs to.

    It is no part of the dataset and may be deleted; with it goes what covers the times at which
    the inputs were last changed.
    """
    if manifest.split != "train":
        return
    url = store.url(JOB)
    try:
        with report.unreadable(url):
            if not store.exists(JOB):
                report.notes.append(f"there is no {url}; a dataset is whole without it")
                return
            job = JobFile.read_from(store, checked=False)
            report.add(url, "digest", job.compute_digest(), job.digest or "none")
            if job.digest == job.compute_digest():
                _check_belongs(store, manifest, job, report)
    except MalformedJson as error:
        report.add(url, "content", "a job", error)


def _check_belongs(store: Store, manifest: Manifest, job: JobFile, report: VerifyReport) -> None:
    """Compare the job with its plan: that of this version, or of a later one, finished or begun."""
    plans = plan_digests(manifest)
    name = plan_name(len(plans) - 1)
    later = _PLAN_FILE.fullmatch(job.plan_file)
    if later and int(later[1]) >= len(plans):
        name = later[0]
    else:
        report.add(store.url(JOB), "plan", plans[-1], job.plan)
    if (name != plan_name(len(plans) - 1) or job.plan == plans[-1]) and store.exists(name):
        found = hashlib.sha256(store.read(name)).hexdigest()
        report.add(store.url(name), "sha256", job.plan_sha256, found)
