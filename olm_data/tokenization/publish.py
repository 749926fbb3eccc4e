"""The last step of a run: from the results of all tasks to the manifests that name them.

    results, accounts -> sums checked -> census of the documents (duplicates, fingerprint)
                      -> manifest of the validation split -> manifest.json (last, conditional)

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
from olm_data.dataset.manifest import MANIFEST, InputInfo, Manifest, build_manifest, read_manifest
from olm_data.dataset.options import Split
from olm_data.dataset.plan import Plan
from olm_data.dataset.tokenizer import TOKENIZER, TokenizerInfo
from olm_data.dataset.tools import PassedCount, Tools
from olm_data.sources.passed import tally
from olm_data.storage.store import Store
from olm_data.tokenization.census import Census, take_census
from olm_data.tokenization.committed import TaskResult
from olm_data.tokenization.request import Request

SPLITS: tuple[Split, ...] = ("train", "validation")


def publish(
    request: Request,
    plan: Plan,
    splits: Sequence[Store],
    results: Sequence[TaskResult],
    accounts: Sequence[InputAccount],
    encoder: str,
) -> list[Manifest]:
    """Check the accounts and write the manifests of a new dataset, the main one last.

    Args:
        splits: stores of the training split and, where documents are held out, of validation.
        results, accounts: of all tasks, in order.
        encoder: name of the encoder used.

    Raises:
        ConflictError: another writer was faster.
    """
    inputs, dropped = input_totals(plan, accounts)
    manifests = []
    for number, split in enumerate(SPLITS[: len(splits)]):
        records = [result.splits[number] for result in results]
        manifest = build_manifest(
            tokenizer=TokenizerInfo.of(request.tokenizer, request.recipe.special),
            dtype=request.tokenizer.dtype,
            options=msgspec.structs.replace(request.options(), split=split),
            plan=plan.digest,
            inputs=inputs,
            records=records,
            dropped=dict(dropped),
            documents_in=sum(item.documents for item in inputs),
            tools=tools(encoder, request.tokenizer.name, tally(request.source.passed)),
            container=request.recipe.container,
        )
        manifests.append(manifest)
    manifests, _ = counted(splits, manifests)
    for store, manifest in reversed(list(zip(splits, manifests, strict=True))):
        store.put(TOKENIZER, request.tokenizer.json_bytes)
        # an earlier run may have ended between the two manifests
        again = store is not splits[0] and store.exists(MANIFEST)
        if not (again and read_manifest(store).digest == manifest.digest):
            store.create(MANIFEST, manifest.encode())
    return manifests


def counted(
    splits: Sequence[Store], manifests: Sequence[Manifest]
) -> tuple[list[Manifest], Census]:
    """Check that no document is lost, take the census, and note it in the manifests' `tools`."""
    totals = manifests[0].totals
    kept = sum(manifest.totals.documents for manifest in manifests)
    dropped = sum(manifests[0].dropped.values())
    if totals.documents_in != kept + dropped:
        raise unaccounted(
            f"{totals.documents_in:,} records in, {kept:,} documents out, {dropped:,} dropped",
            splits[0].root,
        )
    census = take_census(
        [
            (store, shard)
            for store, manifest in zip(splits, manifests, strict=True)
            for shard in manifest.shards
        ],
        kept,
        len(manifests[0].inputs),
    )
    noted = []
    for manifest in manifests:
        tools = msgspec.structs.replace(manifest.tools, copies=census.copies)
        noted.append(msgspec.structs.replace(manifest, stored_tools=tools.stored()))
    return noted, census


def input_totals(
    plan: Plan, accounts: Sequence[InputAccount]
) -> tuple[list[InputInfo], Counter[str]]:
    """Sum the accounts of all tasks: each input of the plan, and all drops by reason."""
    documents: Counter[int] = Counter()
    parts: dict[int, list[str]] = {}
    for account in accounts:
        documents[account.input] += account.documents_in
        parts.setdefault(account.input, []).append(account.sha256)
    inputs = [
        InputInfo(
            path=item.path,
            bytes=item.bytes,
            position=item.position,
            documents=documents[index],
            sha256=input_digest(parts.get(index, [])),
        )
        for index, item in enumerate(plan.inputs)
    ]
    return inputs, dropped_of(accounts)


def tools(encoder: str, tokenizer: str, passed: dict[str, PassedCount]) -> Tools:
    """Return the software's versions and what was passed over: a manifest's informational part."""
    packages = ["numpy", "pyarrow", "tokenizers"]
    if encoder == "gigatoken":
        packages.append("gigatoken")
    own = {"olm": __version__, "python": platform.python_version()}
    return Tools(
        versions=own | {name: version(name) for name in packages},
        encoder=encoder,
        tokenizer=tokenizer,
        passed_over=passed,
    )
