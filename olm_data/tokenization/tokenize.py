"""`olm-data tokenize` and `add`: text becomes a dataset, or more of one, whatever interrupts it.

    Request -> plan -> is it done? begun? another's? -> plan.json (before any shard)
            -> write_shards: tasks on a runner       -> publish: manifest.json (last, conditional)

Everything that decides bytes is in the plan. A run that finds a plan of the same digest goes on
where the earlier one stopped; one that finds another plan refuses and names the difference. An
addition has a plan of its own, plan-0000n.json, and numbers its shards on; a kill at any byte
leaves the old version as it was.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version

import msgspec

from olm_data import __version__
from olm_data.bounded_json import MalformedJson
from olm_data.dataset.account import dropped_of, unaccounted
from olm_data.dataset.arrived import input_totals
from olm_data.dataset.folder import refuse_dataset_folder
from olm_data.dataset.manifest import (
    MANIFEST,
    Addition,
    Manifest,
    build_manifest,
    read_manifest,
    refuse_too_many,
)
from olm_data.dataset.options import Split
from olm_data.dataset.plan import Plan, Version, plan_digests
from olm_data.dataset.record import RECORD, stored_plan
from olm_data.dataset.tokenizer import TOKENIZER, TokenizerInfo
from olm_data.dataset.tools import Tools, merged
from olm_data.errors import ConflictError, ValidationError, printable
from olm_data.progress import Progress
from olm_data.runners.base import Runner
from olm_data.sources.passed import passed_lines
from olm_data.sources.txt import notes as text_notes
from olm_data.storage.exclusive import exclusive
from olm_data.storage.store import Store, absolute, create_json
from olm_data.threads import in_order
from olm_data.tokenization.base_dataset import already_there
from olm_data.tokenization.dedup import clear as clear_duplicates
from olm_data.tokenization.duplicates import count_documents
from olm_data.tokenization.job import TokenizeJob
from olm_data.tokenization.request import Request, refuse_identical
from olm_data.tokenization.select_documents import record_options
from olm_data.tokenization.shards import FinishedShards, workers_ready, write_shards
from olm_data.tokenization.summary import Summary
from olm_data.tokenization.task_results import split_stores

DIFFERENCES_SHOWN = 10


def tokenize(request: Request, *, runner: Runner, progress: Progress) -> Summary:
    """Write the dataset or the addition of `request`, or finish writing it.

    Args:
        runner: where the tasks run.
        progress: shows how far it is.

    Raises:
        ConflictError: another process writes there, or another dataset or addition is there.
        InputError: an input is refused, changed while it was read, or has too many bad records.
        ResourceError: no room, no permission, or workers that die.
        StorageError: remote storage failed.
    """
    plan, source, base = request.plan, request.source, request.base
    progress.event(
        "start",
        output=request.output,
        plan=plan.digest,
        tokenizer=request.tokenizer.name,
        inputs=len(source.inputs),
        input_bytes=sum(item.bytes for item in source.inputs),
        passed_over=msgspec.to_builtins(source.passed),
        text_bytes=plan.all_text_bytes,
        shards=len(plan.tasks),
    )
    for line in passed_lines(source.passed):
        progress.note(f"not read: {line}")
    store = Store(request.output, single_writer=request.recipe.single_writer)
    longest = max((stop - start for start, stop in plan.tasks), default=0)
    before = 0 if base is None else len(base.manifest.shards)
    paths = (item.path for item in plan.inputs)
    refuse_too_many(paths, before + len(plan.tasks), longest, store.url(MANIFEST))
    if base is None:
        refuse_dataset_folder(store)
    with ExitStack() as held:
        if base is not None or not store.exists(MANIFEST):  # else nothing is left to do
            job = _job(request, store)
            held.enter_context(workers_ready(job, runner, dedup=bool(request.recipe.dedup)))
        lease = held.enter_context(exclusive(store, note=progress.note))
        splits = split_stores(store, plan)
        for split in splits[1:]:
            held.enter_context(exclusive(split, probe=False))
        complete = _is_complete(request, store)
        versions: list[Version] = []
        if not complete:
            if not request.recipe.allow_duplicates:
                refuse_identical(source)
            separator = source.options.separator
            notes = (*request.notes, *text_notes(source.inputs, separator), request.proof.note)
            for text in notes:
                if text:
                    progress.note(text)
            if base is not None:
                if not store.exists(request.plan_name):  # of two additions at a time one goes on
                    create_json(store, request.plan_name, plan.encode())
                lease.check()
                _clear_given_up(splits, plan)
                versions = [Version.newest(split) for split in splits]
            shards = write_shards(
                request,
                _job(request, store),
                splits,
                versions,
                runner=runner,
                progress=progress,
                lease=lease,
            )
            lease.check()
            manifests = publish(request, splits, versions, shards)
        if request.recipe.dedup:
            clear_duplicates(store)
        if complete:
            return Summary(request, list(map(read_manifest, splits)))
    return Summary(request, manifests, shards)


def _job(request: Request, store: Store) -> TokenizeJob:
    """Return what workers do for the tasks of a request."""
    return TokenizeJob(
        plan=request.plan,
        inputs=request.inputs,
        read=request.source.options,
        tokenizer=request.tokenizer,
        encoder=request.proof.encoder,
        routed=request.proof.routed,
        output=absolute(store.root),
        single_writer=store.single_writer,
    )


def _is_complete(request: Request, store: Store) -> bool:
    """Whether all that the plan makes is there; False if it is to be written or finished.

    Raises:
        ConflictError: something else is there, or was begun.
    """
    plan, name, base = request.plan, request.plan_name, request.base
    manifest = read_manifest(store) if store.exists(MANIFEST) else None
    if base is not None and (manifest is None or manifest.digest != base.manifest.digest):
        raise ConflictError(
            "the dataset has changed since it was opened",
            where=store.root,
            fix="run the command again: it starts from what is there now",
        )
    complete = manifest is not None and plan.digest in plan_digests(manifest)
    try:
        differences = plan.differences(Plan.read(store, name))
    except FileNotFoundError:
        other = base is None and manifest is not None and not complete
        differences = ["its plan.json is gone"] if other else []
    except MalformedJson as error:
        if base is None:
            raise ValidationError(
                "the plan of an earlier run is damaged",
                where=store.url(name),
                fix="delete this output, or choose another --output",
            ) from error
        differences = ["its plan is damaged"]
    if not differences:
        return complete
    shown = [printable(text) for text in differences[:DIFFERENCES_SHOWN]]
    if len(differences) > DIFFERENCES_SHOWN:
        shown.append(f"and {len(differences) - DIFFERENCES_SHOWN} more")
    listed = "\n    " + "\n    ".join(shown)
    if base is not None:
        raise ConflictError(
            f"another addition to this dataset was begun and not finished; it differs:{listed}",
            where=store.url(name),
            fix=f"finish it by running its command again; or give it up: delete {name}",
        )
    state = "another dataset" if manifest is not None else "the beginning of another dataset"
    raise ConflictError(
        f"the output holds {state}, of other inputs or options:{listed}",
        where=store.root,
        fix="choose another --output, or delete this one and run the command again",
    )


def _clear_given_up(splits: Sequence[Store], plan: Plan) -> None:
    """Remove the commit records that an addition left which was given up.

    The plan that is stored has the shard numbers from here on to itself.
    """

    def clear(name: str) -> None:
        for store in splits:
            found = stored_plan(store, name)
            if found not in (None, plan.digest):
                store.delete(name + RECORD)

    list(in_order(clear, plan.shards))


SPLITS: tuple[Split, ...] = ("train", "validation")


def publish(
    request: Request,
    splits: Sequence[Store],
    versions: Sequence[Version],
    shards: FinishedShards,
) -> list[Manifest]:
    """Check the accounts and write the manifests of a new dataset or version, the main one last.

    Args:
        splits: stores of the training split and, where documents are held out, of validation.
        versions: of the splits of a dataset that the shards are added to; [] for a new one.

    Raises:
        ConflictError: another writer was faster.
        InputError: a new input has the same documents as one that the dataset has already.
    """
    before: list[Version | None] = [*versions] or [None] * len(splits)
    encoder = request.proof.encoder
    packages = ["numpy", "pyarrow", "tokenizers", *(["gigatoken"] * (encoder == "gigatoken"))]
    own = {"olm": __version__, "python": platform.python_version()}
    tools = Tools(
        versions=own | {name: version(name) for name in packages},
        encoder=encoder,
        tokenizer=request.tokenizer.name,
        passed_over=request.source.passed,
    )
    manifests = [
        _manifest(request, tools, number, old, shards) for number, old in enumerate(before)
    ]
    totals, dropped = manifests[0].totals, sum(manifests[0].dropped.values())
    documents = sum(manifest.totals.documents for manifest in manifests)
    if totals.documents_in != documents + dropped:
        raise unaccounted(
            f"{totals.documents_in:,} records in, {documents:,} documents out, {dropped:,} dropped",
            splits[0].root,
        )
    written = [
        (store, shard)
        for store, manifest in zip(splits, manifests, strict=True)
        for shard in manifest.shards
    ]
    counts = count_documents(written, documents, len(manifests[0].inputs))
    if request.base is not None and not request.recipe.allow_duplicates:
        for later, twin in counts.equal_inputs():
            if later >= len(request.base.inputs):
                paths = [item.path for item in request.inputs]
                raise already_there(paths[later], paths[twin], finished=True)
    for number, manifest in enumerate(manifests):
        stored = {**(manifest.stored_tools or {}), **counts.copies.stored()}
        manifests[number] = msgspec.structs.replace(manifest, stored_tools=stored)
    for store, old, manifest in reversed(list(zip(splits, before, manifests, strict=True))):
        if old is not None:
            old.replace(manifest)
            continue
        store.put(TOKENIZER, request.tokenizer.json_bytes)
        # an earlier run may have ended between the two manifests
        again = store is not splits[0] and store.exists(MANIFEST)
        if not (again and read_manifest(store).digest == manifest.digest):
            create_json(store, MANIFEST, manifest.encode())
    return manifests


def _manifest(
    request: Request, tools: Tools, number: int, before: Version | None, shards: FinishedShards
) -> Manifest:
    """Return the manifest of split `number`, without the counts of duplicates."""
    plan, records = request.plan, [result.splits[number] for result in shards.results]
    inputs, dropped = input_totals(plan.inputs, shards.accounts), dropped_of(shards.accounts)
    added, first_plan, options = [], plan.digest, plan.settings.options(SPLITS[number])
    if before is not None and request.base is not None:
        old, first = before.manifest, len(request.base.inputs)
        if any(addition.plan == plan.digest for addition in old.additions):
            return old  # an earlier run ended between the two manifests
        assert old.tokenized is not None
        options, first_plan = old.tokenized, old.plan
        inputs = [*old.inputs, *inputs[first:]]
        records = before.records() + records
        dropped.update(old.dropped)
        passed = merged(old.tools.passed_over, tools.passed_over)
        tools = msgspec.structs.replace(tools, passed_over=passed)
        addition = Addition(
            parent=str(old.digest),
            plan=plan.digest,
            first_shard=request.base.shards,
            first_input=first,
            options=record_options(request.source.options),
        )
        added = [*old.additions, addition]
    return build_manifest(
        tokenizer=TokenizerInfo.of(request.tokenizer, request.recipe.special),
        dtype=request.tokenizer.dtype,
        options=options,
        plan=first_plan,
        inputs=inputs,
        records=records,
        dropped=dict(dropped),
        documents_in=sum(item.documents for item in inputs),
        tools=tools,
        added=added,
        container=request.recipe.container,
    )
