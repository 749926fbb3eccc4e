"""`tokenize --like DATASET`: the same documents, in the same order, under another tokenizer.

    DATASET: manifest.json, plan.json, job.json --request_like--> Request, with the units and tasks
             of the plan and another tokenizer in its settings

Inputs are not looked for again: they are those of the record, at the places where it was read, and
refused if one has changed since.
"""

from __future__ import annotations

from fractions import Fraction
from importlib.metadata import version

import msgspec

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.job import JobFile
from olm_data.dataset.manifest import JOB, read_manifest
from olm_data.dataset.plan import read_plans
from olm_data.errors import InputError, UsageError, printable
from olm_data.extras import needs
from olm_data.sources import current_revision
from olm_data.sources.base import SourcePlan
from olm_data.sources.own import refuse_untrusted
from olm_data.storage.output_paths import refuse_output
from olm_data.storage.store import Store
from olm_data.threads import in_order
from olm_data.tokenization.base_dataset import require_filter
from olm_data.tokenization.decontaminate import stored_texts
from olm_data.tokenization.recipe import Recipe
from olm_data.tokenization.request import Request
from olm_data.tokenization.select_documents import stored_ids
from olm_data.tokenizer.tokenizer import load_tokenizer

_OPEN = {"like", "tokenizer", "output", "eos", "bos", "encoder", "filter", "max_bad"}
_OPEN |= {"single_writer", "workers", "runner", "slurm", "ray_address", "storage_options"}
"""Fields that change nothing of which documents there are, and where they stand."""


def request_like(recipe: Recipe) -> Request:
    """Return the request for the documents of the dataset `recipe.like` by `recipe.tokenizer`.

    Raises:
        UsageError: a field that the dataset decides, or no tokenizer or output.
        InputError: the dataset has no such record, or one of its inputs has changed.
        ValidationError: its plan is damaged.
    """
    assert recipe.like is not None
    store, usual = Store(recipe.like), Recipe()
    if fixed := [
        "INPUT" if name == "inputs" else "--" + name.replace("_", "-")
        for name in Recipe.__struct_fields__
        if name not in _OPEN and getattr(recipe, name) != getattr(usual, name)
    ]:
        raise UsageError(
            f"--like takes what {', '.join(fixed)} would say from the dataset",
            where=f"--like {recipe.like}",
            fix="leave it out",
        )
    if recipe.tokenizer is None or recipe.output is None:
        raise UsageError(
            "--like wants another tokenizer, and an output",
            where=f"--like {recipe.like}",
            fix="give --tokenizer and --output",
        )
    refuse_output(recipe.output)
    manifest = read_manifest(store)
    options, plans = manifest.tokenized, read_plans(store, manifest)
    try:
        job = JobFile.read_from(store)
    except (FileNotFoundError, MalformedJson):
        job = None
    if options is None or manifest.split != "train" or job is None:
        raise _no_record(store, "tokenize did not make it here, or its job.json is gone")
    if len(plans) > 1 or job.plan != plans[0].digest:
        raise _no_record(store, "inputs were added to it, so it has more than one plan")
    if job.read.chat is not None:
        raise _no_record(store, "its conversations are rendered for its tokenizer")
    refuse_untrusted(job.inputs, store.url(JOB))
    require_filter(recipe, job.read.filter, f"--like {recipe.like}")
    for library in job.read.libraries:
        with needs(f"--like {recipe.like}"):
            here = f"{library.split()[0]} {version(library.split()[0])}"
        if here != library:
            raise _no_record(store, f"it was made with {printable(library)}, and this is {here}")
    revisions = in_order(current_revision, job.inputs)
    for item, now in zip(job.inputs, revisions, strict=True):
        if now != item.revision:
            raise InputError(
                "an input has changed since the dataset was made, or is gone",
                where=printable(item.url),
                why="the documents would be other ones",
                fix="restore it, with its time of modification; or make both datasets anew",
            )
    tokenizer = load_tokenizer(recipe.tokenizer, eos=recipe.eos, bos=recipe.bos)
    settings = msgspec.structs.replace(
        plans[0].settings,
        tokenizer=tokenizer.sha256,
        tokenizer_probe=tokenizer.probe_sha256,
        vocab_size=tokenizer.vocab_size,
        bos=tokenizer.bos,
        eos=tokenizer.eos,
    )
    recipe = msgspec.structs.replace(
        recipe,
        seed=options.seed,
        holdout=Fraction(options.holdout),
        container=options.container,
        special=settings.special,
        dedup=options.dedup,
        minhash="x".join(map(str, options.minhash)) if options.minhash else usual.minhash,
        shuffle_documents=options.shuffle_documents,
        allow_duplicates=True,  # they were looked at
    )
    found = SourcePlan(
        name="like",
        inputs=job.inputs,
        options=job.read,
        excluded=stored_ids(store, job.read.exclude),
        limit=options.limit,
        text_bytes=options.last.text_bytes if options.last else None,
    )
    evaluated = stored_texts(store, options.decontaminate)
    return Request.of(recipe, found, tokenizer, evaluated=evaluated, plan=plans[0].by(settings))


def _no_record(store: Store, why: str) -> InputError:
    return InputError(
        "the same documents cannot be made of the record of this dataset",
        where=f"--like {store.root}",
        why=why,
        fix="run its tokenize command again with the other --tokenizer and another --output",
    )
