"""A job as a file: `job.json` beside `plan.json`, so that a worker elsewhere needs storage only.

    parent: TokenizeJob -> tokenizer.json, then job.json       before any task runs
    worker: plan.json + tokenizer.json + job.json -> TokenizeJob

The file is not digested: it holds where the inputs are read (`url`), which may differ between two
runs that make the same bytes.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from olm_data import __version__
from olm_data.bounded_json import MalformedJson
from olm_data.config.import_path import is_import_path
from olm_data.dataset.inputs import RecordOptions
from olm_data.dataset.job import JobFile, TokenizerIdentity
from olm_data.dataset.manifest import JOB
from olm_data.dataset.plan import Plan
from olm_data.dataset.tokenizer import TOKENIZER
from olm_data.errors import ValidationError
from olm_data.sources.own import refuse_untrusted, untrusted
from olm_data.storage.store import Store, read_json, write_json
from olm_data.tokenization.job import FindDuplicates, TokenizeJob
from olm_data.tokenization.task_results import damaged_run, no_run


def write_job(job: TokenizeJob | FindDuplicates, plan_name: str) -> None:
    """Write `tokenizer.json` and then `job.json` to the job's output, unless they are there.

    Args:
        plan_name: the file with the job's plan.
    """
    store = job.splits[0]
    for name, data in (
        (TOKENIZER, job.tokenizer.json_bytes),
        (JOB, job_file(job, plan_name).encode()),
    ):
        try:
            there = read_json(store, name)
        except (FileNotFoundError, MalformedJson):
            there = None
        if there != data:
            write_json(store, name, data)


def job_file(job: TokenizeJob | FindDuplicates, plan_name: str) -> JobFile:
    """Return the job as its file holds it."""
    settings = job.plan.settings
    drop_or_keep: Literal["drop", "keep"] = "drop" if settings.dedup else "keep"
    return JobFile(
        plan_file=plan_name,
        packages=_packages(job.encoder, job.read),
        plan_sha256=hashlib.sha256(job.plan.encode()).hexdigest(),
        plan=job.plan.digest,
        inputs=job.inputs,
        read=job.read.recorded,
        tokenizer=TokenizerIdentity.of(job.tokenizer),
        encoder=job.encoder,
        routed=job.routed,
        special=settings.special,
        holdout=settings.holdout_below,
        single_writer=job.single_writer,
        shuffle=settings.shuffle,
        duplicates="find" if isinstance(job, FindDuplicates) else drop_or_keep,
    )


def load_job(output: str, *, trust: bool = False) -> TokenizeJob | FindDuplicates:
    """Return the job that `write_job` left at `output`.

    Args:
        trust: classes of somebody's own that it names may be imported.

    Raises:
        InputError: there is none, or it names classes and is not trusted.
        ValidationError: its files are damaged or do not belong together, or this machine has other
            versions of the packages that decide bytes.
    """
    store = Store(output)
    try:
        stored = JobFile.read_from(store)
        plan = Plan.read(store, stored.plan_file)
        tokenizer_json = store.read(TOKENIZER)
    except FileNotFoundError as error:
        raise no_run(output) from error
    except MalformedJson as error:
        raise damaged_run(store, JOB, str(error)) from error
    if not trust:
        refuse_untrusted(stored.inputs, store.url(JOB))
        if is_import_path(stored.encoder):
            raise untrusted(stored.encoder, store.url(JOB))
        if stored.read.filter is not None:
            raise untrusted(stored.read.filter.path, store.url(JOB))
    _check_packages(stored, output)
    if stored.plan != plan.digest:
        raise damaged_run(store, JOB, "plan.json is that of another run")
    kind = FindDuplicates if stored.duplicates == "find" else TokenizeJob
    return kind(
        plan=plan,
        inputs=stored.inputs,
        read=stored.read,
        tokenizer=stored.tokenizer.open(tokenizer_json),
        encoder=stored.encoder,
        routed=stored.routed,
        output=output,
        single_writer=stored.single_writer,
    )


def _packages(encoder: str, read: RecordOptions) -> dict[str, str]:
    """Versions of the packages whose bytes reach the shards."""
    names = ["pyarrow", "tokenizers", *(["gigatoken"] if encoder == "gigatoken" else [])]
    names += [library.split()[0] for library in read.libraries]
    return {"olm": __version__, **{name: version(name) for name in names}}


def _check_packages(job: JobFile, output: str) -> None:
    try:
        here = _packages(job.encoder, job.read)
    except PackageNotFoundError as error:
        raise ValidationError(
            f"this machine does not have the package {error}",
            where=output,
            fix="install the same versions everywhere",
        ) from error
    other = [
        f"{n} {v} there, {here.get(n)} here" for n, v in job.packages.items() if here.get(n) != v
    ]
    if other:
        raise ValidationError(
            "this machine has other versions of packages than the run began with",
            where=output,
            why="the shards of one dataset would differ: " + "; ".join(other),
            fix="install the same versions everywhere",
        )
