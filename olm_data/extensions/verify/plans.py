"""The checks `verify` makes on the plans, the accounts of inputs, and the job of a dataset.

plan.json, plan-00001.json, ... -> digest, spelling, accounts of all their tasks -> findings
job.json                        -> its digest, the plan it belongs to            -> findings
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.account import InputAccount, input_digest
from olm_data.dataset.job import JobFile
from olm_data.dataset.manifest import JOB, MANIFEST, Manifest
from olm_data.dataset.plan import Plan, plan_digests, plan_name
from olm_data.dataset.record import RECORD, ShardRecord
from olm_data.extensions.verify.shard import VerifyReport, read_or_report
from olm_data.storage.store import Store
from olm_data.threads import in_order

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
        with own.unreadable(store.url(name)):
            data = read_or_report(store, name, own)
            try:
                return own, [] if data is None else ShardRecord.parse(data).accounts
            except MalformedJson as error:
                own.add(store.url(name), "content", "a commit record", error)
        return own, []

    documents: Counter[int] = Counter()
    parts: dict[int, list[str]] = {}
    read = list(in_order(accounts_of, names, threads))
    for own, accounts in read:
        report.include(own.findings)
        for account in accounts:
            documents[account.input] += account.documents_in
            parts.setdefault(account.input, []).append(account.sha256)
    if any(own.findings for own, _ in read):
        return  # without all records, no sum can be right
    for index, item in enumerate(manifest.inputs):
        where = f"{store.url(MANIFEST)} input {item.path}"
        report.add(where, "documents", documents[index], item.documents)
        report.add(where, "sha256", input_digest(parts.get(index, [])), item.sha256)


def _check_plan(store: Store, name: str, digest: str, report: VerifyReport) -> Plan | None:
    """Return a plan whose digest is right; its spelling must be the one it was written in.

    The digest leaves out when each input was last changed: `check_job` covers that.
    """
    url, data = store.url(name), None
    with report.unreadable(url):
        data = read_or_report(store, name, report)
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
