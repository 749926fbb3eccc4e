"""`olm-data add`: new inputs go on where a dataset ends; what is there is never written again.

    dataset's newest version + new inputs -> plan-0000n.json (conditional create: one addition at a
    time) -> tasks on a runner, shards numbered on -> old manifest kept -> manifest.json replaced

Tokenizer and all options that change bytes come from the dataset; how the new inputs are read
(column, separator) may differ. A kill at any byte leaves the old version as it was, and the same
command finishes to the same bytes. Never: rewrites a shard, or takes an input that is in the
dataset already unless it is told to.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.history import Version, plan_name
from olm_data.dataset.manifest import (
    VALIDATION,
    Addition,
    InputInfo,
    Manifest,
    build_manifest,
    read_manifest,
)
from olm_data.dataset.plan import Plan
from olm_data.dataset.record import RECORD, stored_plan
from olm_data.dataset.tools import merged
from olm_data.errors import ConflictError, printable
from olm_data.progress import Progress
from olm_data.runners.base import Runner
from olm_data.sources.base import SourcePlan
from olm_data.sources.passed import passed_lines, tally
from olm_data.storage.exclusive import exclusive
from olm_data.storage.store import Store
from olm_data.threads import in_order
from olm_data.tokenization.add_request import Existing, in_twice
from olm_data.tokenization.publish import counted, input_totals, tools
from olm_data.tokenization.recipe import Recipe
from olm_data.tokenization.request import Request, refuse_identical
from olm_data.tokenization.run import (
    Made,
    Summary,
    already_complete,
    forget_duplicates,
    make_shards,
    summarise,
)


def add(
    existing: Existing,
    recipe: Recipe,
    source: SourcePlan,
    *,
    runner: Runner,
    progress: Progress,
) -> Summary:
    """Add `source` to a dataset, or finish adding it. Arguments and errors as `tokenize.tokenize`.

    Args:
        recipe: says how; what changes bytes is as in the dataset.

    Raises:
        InputError: an input is in the dataset already.
        ConflictError: another addition was begun there, or another process writes there.
    """
    store = existing.store
    with ExitStack() as held:
        lease = held.enter_context(exclusive(store, note=progress.note))
        splits = [store]
        if existing.options.holdout_below:
            splits.append(store.child(VALIDATION))
            held.enter_context(exclusive(splits[1], probe=False))
        if read_manifest(store).digest != existing.manifest.digest:
            raise ConflictError(
                "the dataset has changed since it was opened",
                where=store.root,
                fix="run the command again: it starts from what is there now",
            )
        if existing.done_by(recipe, source):
            validation = read_manifest(splits[1]) if len(splits) == 2 else None
            tasks = len(existing.plans[-1].tasks)
            forget_duplicates(existing.request(recipe, source), store)
            return already_complete(store.root, existing.manifest, validation, tasks)
        for line in passed_lines(tally(source.passed)):
            progress.note(f"not read: {line}")
        request = existing.request(recipe, source)
        assert request.base is not None
        plan = request.plan()
        name = plan_name(request.base.number)
        _refuse_other(store, name, plan)
        if not recipe.allow_duplicates:
            existing.refuse_known(source)
            refuse_identical(source)
        for renamed, item in zip(request.source.inputs, source.inputs, strict=True):
            if renamed.path != item.path:
                progress.note(
                    f"{printable(item.path)} is the name of another input there; "
                    f"this one is recorded as {printable(renamed.path)}"
                )
        if not store.exists(name):
            store.create(name, plan.encode())
        lease.check()
        _clear_given_up(splits, plan)
        made = make_shards(
            request,
            plan,
            name,
            splits,
            runner=runner,
            progress=progress,
            lease=lease,
            before=[read_manifest(split) for split in splits],
        )
        lease.check()
        manifests = _publish(existing, request, plan, splits, made)
        forget_duplicates(request, store)
    return summarise(store.root, manifests, made)


def _publish(
    existing: Existing,
    request: Request,
    plan: Plan,
    splits: Sequence[Store],
    made: Made,
) -> list[Manifest]:
    """Write the manifests of the new version, validation first."""
    assert request.base is not None
    first = len(request.base.inputs)
    totals, dropped = input_totals(plan, made.accounts)
    before = [Version.newest(split) for split in splits]
    manifests = []
    for number, version in enumerate(before):
        old = version.manifest
        if _made_by(old, plan):  # an earlier run ended between the two manifests
            manifests.append(old)
            continue
        inputs: list[InputInfo] = [*old.inputs, *totals[first:]]
        addition = Addition(
            parent=str(old.digest),
            plan=plan.digest,
            first_shard=request.base.shards,
            first_input=first,
            stored_options=request.source.options.stored(),
        )
        manifests.append(
            build_manifest(
                tokenizer=old.tokenizer,
                dtype=request.tokenizer.dtype,
                options=old.options,
                plan=old.plan,
                inputs=inputs,
                records=version.records() + [result.splits[number] for result in made.results],
                dropped={
                    reason: old.dropped.get(reason, 0) + dropped.get(reason, 0)
                    for reason in old.dropped.keys() | dropped.keys()
                },
                documents_in=sum(item.documents for item in inputs),
                tools=tools(
                    made.proof.encoder,
                    request.tokenizer.name,
                    merged(old.tools.passed_over, tally(request.source.passed)),
                ),
                added=[*old.additions, addition],
                container=old.container,
            )
        )
    manifests, census = counted(splits, manifests)
    if not request.recipe.allow_duplicates:
        for later, twin in census.twins():
            if later >= first:
                paths = [item.path for item in request.inputs]
                raise in_twice(paths[later], paths[twin], finished=True)
    for version, manifest in reversed(list(zip(before, manifests, strict=True))):
        version.replace(manifest)
    return manifests


def _made_by(manifest: Manifest, plan: Plan) -> bool:
    return any(addition.plan == plan.digest for addition in manifest.additions)


def _refuse_other(store: Store, name: str, plan: Plan) -> None:
    """Refuse where another addition was begun and not finished."""
    try:
        differences = plan.differences(Plan.read(store, name))
    except FileNotFoundError:
        return
    except MalformedJson:
        differences = ["its plan is damaged"]
    if differences:
        shown = [printable(text) for text in differences[:10]]
        raise ConflictError(
            "another addition to this dataset was begun and not finished",
            where=store.url(name),
            why="it differs from this one:\n    " + "\n    ".join(shown),
            fix=f"finish it by running its command again; or give it up: delete {name}",
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
