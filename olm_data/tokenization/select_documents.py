"""Which records a recipe takes becomes part of a source.

    source + --exclude-ids FILE, --sample SHARE, --seed N, --limit N
        -> the same source, its options filled in, its inputs ending where the limit is reached
    exclude-ids.npy of an output -> stored_ids

`--limit` is found by reading the beginning of the inputs once, without encoding, so that it is part
of the plan and the work can be shared out. Nothing past the last document is planned or counted.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import msgspec

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.inputs import RecordOptions
from olm_data.dataset.manifest import EXCLUDED, MAX_IDS, PLAN
from olm_data.dataset.plan import DEFAULT_SHARD_TOKENS, TEXT_BYTES_PER_TOKEN, Plan
from olm_data.decoding import convert
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.select.selection import IdSet
from olm_data.sources import plan_units, read_units
from olm_data.sources.base import SourcePlan
from olm_data.sources.id_file import read_ids
from olm_data.storage.store import Store


def select_documents(
    source: SourcePlan,
    *,
    exclude_ids: str | None = None,
    sample: Fraction | None = None,
    seed: int = 0,
    limit: int | None = None,
    output: str | None = None,
) -> SourcePlan:
    """Return the source with the selection applied: where, exclude, sample, filter, limit.

    Args:
        exclude_ids: a file of ids to leave out, one a line.
        sample: share of the documents to draw, above 0 and below 1.
        seed: of the draw.
        limit: documents to take, counted after the rest of the selection.
        output: where the dataset is to be; a plan there may tell where the limit is reached.

    Raises:
        UsageError: a share of 0.
        InputError: ids to leave out where records have none, or a file that cannot be read.
        StorageError: remote storage fails.
    """
    if sample is not None and not 0 < sample < 1:
        raise UsageError(
            "a sample holds more than nothing and less than all",
            where=f"--sample {sample}",
            fix="write 1%, 0.01 or 1/100, or leave it out",
        )
    if sample is not None:
        source = source.reading(sample=str(sample), seed=seed)
    if exclude_ids is not None:
        options = source.options
        whole_files = options.separator is None and any(f.format == "txt" for f in source.inputs)
        if options.id_column is None and not whole_files:
            raise InputError(
                "the records have no ids to leave out by",
                where=f"--exclude-ids {exclude_ids}",
                fix="say which column or field holds them: --id-column NAME",
            )
        ids = read_ids(exclude_ids)
        source = replace(source.reading(exclude=ids.sha256), excluded=ids)
    if limit is None:
        return source
    known = None if output is None else limited_before(source, limit, Store(output))
    return known or limited(source, limit)


def record_options(options: RecordOptions) -> RecordOptions:
    """Return of options what is taken from each record, as files keep it."""
    return convert(options.recorded, RecordOptions, from_attributes=True)


def stored_ids(store: Store, digest: str | None) -> IdSet | None:
    """Return the ids to leave out that are stored beside a plan; None where there is no `digest`.

    Raises:
        ValidationError: they are missing, or not those of the digest.
    """
    if digest is None:
        return None
    try:
        ids = IdSet.from_npy(store.read(EXCLUDED, limit=MAX_IDS))
    except (FileNotFoundError, ValueError):
        ids = None
    if ids is None or ids.sha256 != digest:
        raise ValidationError(
            "the ids to leave out are missing or damaged",
            where=store.url(EXCLUDED),
            fix="run the tokenize command that made the file again, or restore it from a copy",
        )
    return ids


def limited_before(source: SourcePlan, limit: int, store: Store) -> SourcePlan | None:
    """Return the source that ends as the store's plan says; None if it is not of this request.

    So a run that goes on, or finds its dataset complete, need not read the beginning again.
    """
    try:
        plan = Plan.read(store, PLAN)
    except (FileNotFoundError, MalformedJson, ValidationError):
        return None  # there is none, or it is damaged, which is said when the run begins
    last, planned = plan.settings.last, plan.inputs
    if last is None or not 0 < len(planned) <= len(source.inputs):
        return None
    inputs = source.inputs[: len(planned)]
    then, now = (
        msgspec.structs.replace(record_options(options), libraries=())  # known later
        for options in (plan.settings, source.options)
    )
    same = plan.settings.limit == limit and then == now
    same = same and all(
        (there.path, there.bytes, there.revision) == (input.path, input.bytes, input.revision)
        for there, input in zip(planned, inputs, strict=True)
    )
    whole = last.position is None and len(planned) != len(source.inputs)
    if not same or whole or last.path != inputs[-1].path:
        return None
    inputs = (*inputs[:-1], msgspec.structs.replace(inputs[-1], until=last.position))
    return replace(source, inputs=inputs, limit=limit, text_bytes=last.text_bytes)


def limited(source: SourcePlan, limit: int) -> SourcePlan:
    """Return the source that ends with its document number `limit`; all of it if it has fewer.

    Reads that many documents.

    Raises:
        InputError: an input cannot be read.
        StorageError: remote storage fails.
    """
    taken = text_bytes = 0
    target = DEFAULT_SHARD_TOKENS * TEXT_BYTES_PER_TOKEN
    for index, input in enumerate(source.inputs):
        units = plan_units(index, input, source.options, target)
        for batch in read_units(source.inputs, units, source.options, source.excluded):
            wanted = limit - taken
            if batch.documents >= wanted:
                last = msgspec.structs.replace(input, until=int(batch.positions[wanted - 1]))
                return replace(
                    source,
                    inputs=(*source.inputs[:index], last),
                    limit=limit,
                    text_bytes=text_bytes + int(batch.offsets[wanted]),
                )
            taken += batch.documents
            text_bytes += len(batch.data)
    return replace(source, limit=limit, text_bytes=text_bytes)
