"""A job as a file: `job.json` beside `plan.json`, so that a worker elsewhere needs storage only.

    parent: TokenizeJob -> tokenizer.json, then job.json       before any task runs
    worker: plan.json + tokenizer.json + job.json -> TokenizeJob

The file is not digested: it holds where the inputs are read (`url`), which may differ between two
runs that make the same bytes. Never: credentials, or the place of the output itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from olm_data import __version__
from olm_data.canonical import digest
from olm_data.dataset.manifest import JOB
from olm_data.dataset.plan import Plan
from olm_data.dataset.tokenizer import TOKENIZER
from olm_data.errors import InputError, OlmError, ValidationError, typed
from olm_data.kinds import kind_of, wrong_kind
from olm_data.storage.json_file import read_object
from olm_data.storage.store import Store
from olm_data.tokenization.job import TokenizeJob

JOB_VERSION = 1


def write_job(job: TokenizeJob, plan_name: str) -> None:
    """Write `tokenizer.json` and then `job.json` to the job's output, unless they are there.

    Args:
        plan_name: the file with the job's plan.
    """
    store = job.splits[0]
    content = {
        "format": "olm-job",
        "version": JOB_VERSION,
        "plan_file": plan_name,
        "packages": _packages(job.encoder),
        "plan_sha256": hashlib.sha256(job.plan.encode()).hexdigest(),
        **job.to_json(),
    }
    content["digest"] = job_digest(content)
    for name, data in (
        (TOKENIZER, job.tokenizer.json_bytes),
        (JOB, json.dumps(content, indent=1).encode() + b"\n"),
    ):
        try:
            there = store.read(name)
        except FileNotFoundError:
            there = None
        if there != data:
            store.put(name, data)


def load_job(output: str) -> TokenizeJob:
    """Return the job that `write_job` left at `output`.

    Raises:
        InputError: there is none.
        ValidationError: its files are damaged or do not belong together, or this machine has other
            versions of the packages that decide bytes.
    """
    store = Store(output)
    try:
        value = read_object(store, JOB)
        plan = read_object(store, value["plan_file"])
        tokenizer_json = store.read(TOKENIZER)
    except FileNotFoundError as error:
        raise no_run(output) from error
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(store, f"{type(error).__name__}: {error}") from error
    try:
        if (value["format"], value["version"]) != ("olm-job", JOB_VERSION):
            raise _damaged(store, f"not a job of version {JOB_VERSION}")
        if value["digest"] != job_digest(value):
            raise _damaged(store, "its digest is not that of its content")
        _check_packages(value["packages"], value["encoder"], output)
        job = TokenizeJob.from_json(
            value, plan=Plan.from_json(plan), tokenizer_json=tokenizer_json, output=output
        )
        if value["plan"] != job.plan.digest:
            raise _damaged(store, "plan.json is that of another run")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ValidationError | InputError):
            raise
        raise _damaged(store, f"{type(error).__name__}: {error}") from error
    return job


def job_digest(content: Mapping[str, Any]) -> str:
    """Return the digest of a job: of its canonical JSON without the key `digest`."""
    return digest({name: value for name, value in content.items() if name != "digest"})


def no_run(output: str) -> OlmError:
    """Return the error that there is no run at `output`."""
    found = kind_of(output)
    if found not in (None, "dataset", "folder", "empty folder"):
        return wrong_kind(output, str(found), "unfinished dataset")
    return InputError(
        "there is no run here",
        where=output,
        fix=f"olm-data tokenize ... --output {typed(output)} begins one",
    )


def _damaged(store: Store, why: str) -> ValidationError:
    return ValidationError(
        "the files of the run are damaged",
        where=store.url(JOB),
        why=why,
        fix="run the same tokenize command again, or delete this output",
    )


def _packages(encoder: str) -> dict[str, str]:
    """Versions of the packages whose bytes reach the shards."""
    names = ["pyarrow", "tokenizers", *(["gigatoken"] if encoder == "gigatoken" else [])]
    return {"olm": __version__, **{name: version(name) for name in names}}


def _check_packages(wanted: dict[str, Any], encoder: str, output: str) -> None:
    try:
        here = _packages(encoder)
    except PackageNotFoundError as error:
        raise ValidationError(
            f"this machine does not have the package {error}",
            where=output,
            fix="install the same versions everywhere",
        ) from error
    other = [f"{n} {v} there, {here.get(n)} here" for n, v in wanted.items() if here.get(n) != v]
    if other:
        raise ValidationError(
            "this machine has other versions of packages than the run began with",
            where=output,
            why="the shards of one dataset would differ: " + "; ".join(other),
            fix="install the same versions everywhere",
        )
