"""The last step of a run: from the results of all tasks to the manifests that name them.

    results, accounts (, manifests of the version before) -> sums checked
        -> documents counted (duplicates, fingerprint)
        -> manifest of the validation split -> manifest.json (last, conditional)

Of an addition the old manifest is kept, and replaced if it is still the one that was added to.
Never: publish a manifest whose counts do not add up, or put clock time in a digested byte.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

import msgspec

from olm_data import __version__
from olm_data.dataset.account import InputAccount, dropped_of, input_digest, unaccounted
from olm_data.dataset.history import Version
from olm_data.dataset.inputs import RecordOptions
from olm_data.dataset.manifest import (
    MANIFEST,
    Addition,
    InputInfo,
    Manifest,
    build_manifest,
    read_manifest,
)
from olm_data.dataset.options import Split
from olm_data.dataset.plan import Plan
from olm_data.dataset.tokenizer import TOKENIZER, TokenizerInfo
from olm_data.dataset.tools import Tools, merged
from olm_data.decoding import convert
from olm_data.sources.passed import tally
from olm_data.storage.json_file import create_json
from olm_data.storage.store import Store
from olm_data.tokenization.base_dataset import already_there
from olm_data.tokenization.duplicates import count_documents
from olm_data.tokenization.request import Request
from olm_data.tokenization.shards import FinishedShards

SPLITS: tuple[Split, ...] = ("train", "validation")


def publish(
    request: Request,
    plan: Plan,
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
    manifests = [_manifest(request, plan, number, old, shards) for number, old in enumerate(before)]
    totals, dropped = manifests[0].totals, sum(manifests[0].dropped.values())
    documents = sum(manifest.totals.documents for manifest in manifests)
    if totals.documents_in != documents + dropped:
        raise unaccounted(
            f"{totals.documents_in:,} records in, {documents:,} documents out, {dropped:,} dropped",
            splits[0].root,
        )
    stored = [
        (store, shard)
        for store, manifest in zip(splits, manifests, strict=True)
        for shard in manifest.shards
    ]
    counts = count_documents(stored, documents, len(manifests[0].inputs))
    if request.base is not None and not request.recipe.allow_duplicates:
        for later, twin in counts.equal_inputs():
            if later >= len(request.base.inputs):
                paths = [item.path for item in request.inputs]
                raise already_there(paths[later], paths[twin], finished=True)
    for number, manifest in enumerate(manifests):
        tools = msgspec.structs.replace(manifest.tools, copies=counts.copies)
        manifests[number] = msgspec.structs.replace(manifest, stored_tools=tools.stored())
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
    request: Request, plan: Plan, number: int, before: Version | None, shards: FinishedShards
) -> Manifest:
    """Return the manifest of split `number`, without the counts of duplicates."""
    inputs, dropped = _totals(plan, shards.accounts), dropped_of(shards.accounts)
    records = [result.splits[number] for result in shards.results]
    passed, added, first_plan = tally(request.source.passed), [], plan.digest
    options = msgspec.structs.replace(request.options(), split=SPLITS[number])
    if before is not None and request.base is not None:
        old, first = before.manifest, len(request.base.inputs)
        if any(addition.plan == plan.digest for addition in old.additions):
            return old  # an earlier run ended between the two manifests
        assert old.tokenized is not None
        options, first_plan = old.tokenized, old.plan
        inputs = [*old.inputs, *inputs[first:]]
        records = before.records() + records
        dropped.update(old.dropped)
        passed = merged(old.tools.passed_over, passed)
        addition = Addition(
            parent=str(old.digest),
            plan=plan.digest,
            first_shard=request.base.shards,
            first_input=first,
            options=convert(request.source.options.recorded, RecordOptions, from_attributes=True),
        )
        added = [*old.additions, addition]
    encoder = shards.proof.encoder
    packages = ["numpy", "pyarrow", "tokenizers", *(["gigatoken"] * (encoder == "gigatoken"))]
    own = {"olm": __version__, "python": platform.python_version()}
    return build_manifest(
        tokenizer=TokenizerInfo.of(request.tokenizer, request.recipe.special),
        dtype=request.tokenizer.dtype,
        options=options,
        plan=first_plan,
        inputs=inputs,
        records=records,
        dropped=dict(dropped),
        documents_in=sum(item.documents for item in inputs),
        tools=Tools(
            versions=own | {name: version(name) for name in packages},
            encoder=encoder,
            tokenizer=request.tokenizer.name,
            passed_over=passed,
        ),
        added=added,
        container=request.recipe.container,
    )


def _totals(plan: Plan, accounts: Sequence[InputAccount]) -> list[InputInfo]:
    """Sum the accounts of all tasks by input of the plan."""
    documents: Counter[int] = Counter()
    parts: dict[int, list[str]] = {}
    for account in accounts:
        documents[account.input] += account.documents_in
        parts.setdefault(account.input, []).append(account.sha256)
    return [
        InputInfo(
            path=item.path,
            bytes=item.bytes,
            position=item.position,
            documents=documents[index],
            sha256=input_digest(parts.get(index, [])),
        )
        for index, item in enumerate(plan.inputs)
    ]
