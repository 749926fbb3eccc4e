"""`olm-data tokenize` and `add`: text becomes a dataset, or more of one, whatever interrupts it.

    Request -> plan -> is it done? begun? another's? -> plan.json (before any shard)
            -> write_shards: tasks on a runner       -> publish: manifest.json (last, conditional)

Everything that decides bytes is in the plan. A run that finds a plan of the same digest goes on
where the earlier one stopped; one that finds another plan refuses and names the difference. An
addition has a plan of its own, plan-0000n.json, and numbers its shards on; a kill at any byte
leaves the old version as it was. Never: a shard of an older version written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.folder import refuse_dataset_folder
from olm_data.dataset.history import Version, plan_digests
from olm_data.dataset.manifest import MANIFEST, read_manifest, refuse_too_many
from olm_data.dataset.plan import Plan
from olm_data.dataset.record import RECORD, stored_plan
from olm_data.errors import ConflictError, ValidationError, printable
from olm_data.progress import Progress
from olm_data.runners.base import Runner
from olm_data.sources.passed import passed_lines, tally
from olm_data.sources.txt import notes as text_notes
from olm_data.storage.exclusive import exclusive
from olm_data.storage.json_file import create_json
from olm_data.storage.store import Store
from olm_data.threads import in_order
from olm_data.tokenization.dedup import clear as clear_duplicates
from olm_data.tokenization.publish import publish
from olm_data.tokenization.request import Request, refuse_identical
from olm_data.tokenization.shards import workers_ready, write_shards
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
    plan, source, base = request.plan(), request.source, request.base
    progress.event(
        "start",
        output=request.output,
        plan=plan.digest,
        tokenizer=request.tokenizer.name,
        inputs=len(source.inputs),
        input_bytes=sum(item.bytes for item in source.inputs),
        passed_over=msgspec.to_builtins(tally(source.passed)),
        text_bytes=plan.all_text_bytes,
        shards=len(plan.tasks),
    )
    for line in passed_lines(tally(source.passed)):
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
            held.enter_context(workers_ready(request, plan, store, runner))
        lease = held.enter_context(exclusive(store, note=progress.note))
        splits = split_stores(store, plan)
        for split in splits[1:]:
            held.enter_context(exclusive(split, probe=False))
        complete = _is_complete(request, plan, store)
        versions: list[Version] = []
        if not complete:
            if not request.recipe.allow_duplicates:
                refuse_identical(source)
            separator = source.options.separator
            for text in (*request.notes, *text_notes(source.inputs, separator)):
                progress.note(text)
            if base is not None:
                if not store.exists(request.plan_name):  # of two additions at a time one goes on
                    create_json(store, request.plan_name, plan.encode())
                lease.check()
                _clear_given_up(splits, plan)
                versions = [Version.newest(split) for split in splits]
            shards = write_shards(
                request, plan, splits, versions, runner=runner, progress=progress, lease=lease
            )
            lease.check()
            manifests = publish(request, plan, splits, versions, shards)
        if request.recipe.dedup:
            clear_duplicates(store)
        if complete:
            return Summary.of_complete(request.output, list(map(read_manifest, splits)), plan)
    return Summary.of_shards(request, plan, manifests, shards)


def _is_complete(request: Request, plan: Plan, store: Store) -> bool:
    """Whether all that the plan makes is there; False if it is to be written or finished.

    Raises:
        ConflictError: something else is there, or was begun.
    """
    name, base = request.plan_name, request.base
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
