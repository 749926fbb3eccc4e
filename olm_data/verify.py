"""`olm-data verify`: prove that a dataset, or every dataset of a lock, is what its digests say.

    manifest -> each shard (verify_shard.py) -> manifest rebuilt from the records and compared
             -> plan and accounts of inputs -> tokenizer -> round trip of a sample of documents

Each disagreement is a `Finding` (file, field, expected, found) and checking goes on, so that one
run lists them all. Reads every byte once, in bounded pieces, on all granted cores. Never writes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from olm_data.account import InputAccount, input_digest
from olm_data.dataset import Dataset
from olm_data.errors import InputError, OlmError, printable
from olm_data.manifest import (
    MANIFEST,
    PLAN,
    TOKENIZER,
    VALIDATION,
    Manifest,
    ShardInfo,
    build_manifest,
    read_manifest,
)
from olm_data.runners.local import granted_cpus
from olm_data.shard import (
    RECORD,
    ShardRecord,
)
from olm_data.store import Store, is_remote
from olm_data.target import dataset_root, is_lock
from olm_data.tokenizer import TokenizerSpec, open_reference, spec_from_bytes
from olm_data.verify_shard import (
    ShardResult,
    VerifyReport,
    check_shard,
    expected_bytes,
    read_or_report,
)

SAMPLE_DOCUMENTS = 64
SAMPLE_BYTES = 1 << 20  # longer documents are left out of the round trip


def verify(target: str, *, watch: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Verify a dataset (folder or URL) or a mixture lock (a `.json` file).

    Args:
        watch: called with (bytes read, bytes in all) as work goes on.

    Raises:
        InputError: there is nothing of the kind at `target`.
    """
    start = time.monotonic()
    report = VerifyReport(target)
    if is_lock(target):
        _verify_lock(target, report, watch)
    else:
        _verify_dataset(dataset_root(target), report, watch, top=True)
    report.seconds = time.monotonic() - start
    return report


def _verify_lock(
    target: str, report: VerifyReport, watch: Callable[[int, int], None] | None
) -> None:
    from olm_data.mixture import Lock

    if not is_remote(target) and not Path(target).is_file():
        raise InputError(
            "there is no lock file here", where=target, fix="olm-data mix manifest.yaml"
        )
    try:
        lock = Lock.read(target)
        datasets = lock.open_datasets(verify="off")
    except OlmError as error:
        report.add(error.where or target, "lock", "a lock that matches its datasets", error.what)
        return
    for dataset in datasets:
        _verify_dataset(dataset.store.root, report, watch, top=False)


def _verify_dataset(
    root: str, report: VerifyReport, watch: Callable[[int, int], None] | None, *, top: bool
) -> None:
    store = Store(root)
    try:
        manifest = read_manifest(store)
    except InputError:
        if top:
            raise
        report.add(store.url(MANIFEST), "file", "a manifest", "nothing")
        return
    except OlmError as error:
        report.add(store.url(MANIFEST), "content", "an unchanged manifest", error.what)
        return
    report.datasets.append((root, str(manifest.digest)))
    total = sum(expected_bytes(manifest, shard) for shard in manifest.shards)
    read = Counter[str]()

    def seen(count: int) -> None:
        read["bytes"] += count
        if watch is not None:
            watch(read["bytes"], total)

    def check(info: ShardInfo) -> ShardResult:
        return check_shard(store, manifest, info, seen)

    with ThreadPoolExecutor(granted_cpus()) as pool:
        results = list(pool.map(check, manifest.shards))
    inside = 0
    for result in results:
        report.findings += result.report.findings
        inside += result.eos_inside
    if inside:
        report.notes.append(
            f"{inside:,} EOS ids stand inside documents; borders come from ends, never from EOS"
        )
    report.shards += len(manifest.shards)
    report.tokens += manifest.totals.tokens
    report.documents += manifest.totals.documents
    report.bytes_read += read["bytes"]
    if all(result.record for result in results):
        _check_manifest(store, manifest, [r.record for r in results if r.record], report)
    _check_plan(store, manifest, report)
    spec = _check_tokenizer(store, manifest, report)
    if spec is not None and not report.findings:
        _round_trip(Dataset(store, manifest), spec, report)
    if manifest.options.get("split") == "train" and manifest.options.get("holdout", "0") != "0":
        child = store.child(VALIDATION)
        if not child.exists(MANIFEST):
            report.add(child.url(MANIFEST), "file", "the validation split", "nothing")
            return
        _verify_dataset(child.root, report, watch, top=False)


def _check_manifest(
    store: Store,
    manifest: Manifest,
    records: list[tuple[ShardRecord, str]],
    report: VerifyReport,
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
        tools={},
    )
    for name in ("shards", "totals", "max_documents_in"):
        report.add(url, name, getattr(rebuilt, name), getattr(manifest, name))
    report.add(
        url,
        "documents_in",
        manifest.totals.documents_in,
        sum(item.documents for item in manifest.inputs),
    )


def _check_plan(store: Store, manifest: Manifest, report: VerifyReport) -> None:
    """Compare with plan.json, and the account of inputs with the records of all its tasks."""
    if manifest.options.get("split") != "train":
        return
    data = read_or_report(store, PLAN, report)
    if data is None:
        return
    try:
        plan = json.loads(data)
        report.add(store.url(PLAN), "digest", manifest.plan, plan["digest"])
        tasks = len(plan["tasks"])
    except (ValueError, KeyError, TypeError) as error:
        report.add(store.url(PLAN), "content", "a plan", error)
        return
    documents: Counter[int] = Counter()
    parts: dict[int, list[str]] = {}
    for task in range(tasks):
        name = f"shard-{task:05d}{RECORD}"
        found = read_or_report(store, name, report)
        if found is None:
            return
        try:
            units = msgspec.json.decode(found, type=ShardRecord).units
            accounts = [InputAccount.from_json(unit) for unit in units]
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError) as error:
            report.add(store.url(name), "content", "a commit record", error)
            return
        for account in accounts:
            documents[account.input] += account.documents_in
            parts.setdefault(account.input, []).append(account.sha256)
    for index, item in enumerate(manifest.inputs):
        where = f"{store.url(MANIFEST)} input {item.path}"
        report.add(where, "documents", documents[index], item.documents)
        report.add(where, "sha256", input_digest(parts.get(index, [])), item.sha256)


def _check_tokenizer(
    store: Store, manifest: Manifest, report: VerifyReport
) -> TokenizerSpec | None:
    url = store.url(TOKENIZER)
    data = read_or_report(store, TOKENIZER, report)
    if data is None:
        return None
    digest = hashlib.sha256(data).hexdigest()
    report.add(url, "sha256", manifest.tokenizer.sha256, digest)
    if digest != manifest.tokenizer.sha256:
        return None
    spec = spec_from_bytes(data, name="tokenizer.json", eos="none", bos="none")
    report.add(url, "ids of the probe text", manifest.tokenizer.probe_sha256, spec.probe_sha256)
    report.add(url, "vocab_size", manifest.tokenizer.vocab_size, spec.vocab_size)
    return spec


def _round_trip(dataset: Dataset, spec: TokenizerSpec, report: VerifyReport) -> None:
    """Decode a sample of documents, compare the text's hash, encode it again, compare the ids."""
    if not spec.lossless:
        report.notes.append(
            f"round trip not checked: the tokenizer {printable(spec.name)} normalises text, so ids "
            "do not decode to the text they came from"
        )
        return
    rules = dataset.manifest.tokenizer
    reference = spec.reference
    if rules.special == "allow":
        reference = open_reference(spec.encoder_json(strip_special=False), plain=False)
    count = min(SAMPLE_DOCUMENTS, dataset.documents)
    for number in np.linspace(0, dataset.documents - 1, count).astype(int) if count else ():
        document = dataset.document(int(number))
        if document.text_bytes > SAMPLE_BYTES:
            continue
        ids = document.tokens[
            (rules.bos is not None) : len(document.tokens) - (rules.eos is not None)
        ]
        text = spec.decode(ids)
        where = f"{dataset.store.root} document {number}"
        size = len(text.encode())
        report.add(where, "bytes of decoded text", document.text_bytes, size)
        again = reference.encode(text, add_special_tokens=False).ids
        if not np.array_equal(again, ids):
            report.add(where, "round trip", f"{len(ids)} ids", f"{len(again)} other ids")
        report.round_trip += 1
