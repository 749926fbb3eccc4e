"""Compile a mixture manifest against real datasets: exact shares become rows, blocks and a lock.

    Mixture (manifest.py), datasets (sources.py), row plans --compile_lock--> Lock (lock.py)

Everything impossible is refused here, with the numbers, before training starts: mixed tokenizers, a
source without a whole row, a stage shorter than a row, a source drawn beyond its `max_epochs`.
Never: read tokens, or write anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from olm_data import __version__
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.tokenizer import TokenizerInfo, TokenizerRules
from olm_data.dataset.view import ViewInfo
from olm_data.errors import InputError, ValidationError
from olm_data.mixture.compile_stages import compile_stages, ratio, refuse_exhausted
from olm_data.mixture.lock import FORMAT, VERSION, Lock
from olm_data.mixture.lock_format import LockSource
from olm_data.mixture.manifest import Mixture, SourceSpec, located
from olm_data.order.base import Order, SourceSize
from olm_data.packing.concat import rows_in
from olm_data.packing.packings import from_lock
from olm_data.packing.row_plan import PlanInfo
from olm_data.storage.store import is_remote


@dataclass(frozen=True)
class PackedSource:
    """The row plan of a source, and what its view keeps; None where it draws on all documents."""

    plan: PlanInfo
    view: ViewInfo | None = None


def compile_lock(
    mixture: Mixture,
    datasets: Mapping[str, Dataset],
    folder: str = "",
    packed: Mapping[str, PackedSource] = {},
) -> Lock:
    """Compile a manifest against its datasets.

    Args:
        mixture: the parsed manifest.
        datasets: one for each source, by name.
        folder: where the lock will lie (default: the manifest's folder).
        packed: the row plan of each source that needs one, for its packing or view, by name.

    Raises:
        ValidationError: the sources were made by different tokenizers.
        InputError: a source has no whole row.
        UsageError: a stage without a row, or a source drawn beyond its `max_epochs`.
    """
    tokenizer = _one_tokenizer(mixture, datasets)
    sources = tuple(
        _compile_source(mixture, spec, datasets[spec.name], packed.get(spec.name))
        for spec in mixture.sources
    )
    stages = compile_stages(mixture, sources)
    refuse_exhausted(mixture, sources, stages)
    folder = folder or mixture.folder
    order = _compile_order(mixture, sources, datasets)
    lock = Lock(
        format=FORMAT,
        version=VERSION,
        seed=mixture.seed,
        sequence_length=mixture.sequence_length,
        packing=from_lock(mixture.packing.name, order),
        tokenizer=TokenizerRules(
            sha256=tokenizer.sha256,
            probe_sha256=tokenizer.probe_sha256,
            vocab_size=tokenizer.vocab_size,
            bos=tokenizer.bos,
            eos=tokenizer.eos,
        ),
        sources=sources,
        stages=stages,
        locations={
            source.name: _relative(source.data, mixture.folder, folder)
            for source in mixture.sources
        },
        tools={"olm": __version__},
        digest="",
        folder=folder,
        order=order,
    )
    return msgspec.structs.replace(lock, digest=lock.compute_digest())


def _one_tokenizer(mixture: Mixture, datasets: Mapping[str, Dataset]) -> TokenizerInfo:
    first, *others = (source.name for source in mixture.sources)
    ours = datasets[first].manifest.tokenizer
    for name in others:
        theirs = datasets[name].manifest.tokenizer
        if what := ours.difference(theirs, ends=True):
            raise ValidationError(
                f"sources {first!r} and {name!r} were made by different tokenizers: {what} is "
                f"{getattr(ours, what)} ({datasets[first].tokenizer_name}) and "
                f"{getattr(theirs, what)} ({datasets[name].tokenizer_name})",
                where=mixture.where("sources", name),
                why="the same id would mean different text in the two sources",
                fix="tokenise both with the same tokenizer and options",
            )
    return ours


def _compile_source(
    mixture: Mixture,
    spec: SourceSpec,
    dataset: Dataset,
    packed: PackedSource | None,
) -> LockSource:
    length, tokens, documents = mixture.sequence_length, dataset.tokens, dataset.documents
    plan, view = (None, None) if packed is None else (packed.plan, packed.view)
    bound = dataset.manifest.documents_bound(length) if plan is None else plan.most_pieces
    rows = rows_in(tokens, length) if plan is None else plan.rows
    if not rows:
        left, kept = (tokens, "") if view is None else (view.tokens, " in its view")
        needed = mixture.packing.none_because(length)
        raise InputError(
            f"source {spec.name!r} has {left:,} tokens{kept}; {needed}",
            where=mixture.where("sources", spec.name),
            fix="tokenise more text for it, or lower sequence_length, or remove the source",
        )
    return LockSource(
        name=spec.name,
        dataset=dataset.digest,
        tokens=tokens,
        documents=documents,
        rows=rows,
        dtype=dataset.dtype.name,
        max_documents_per_row=bound,
        max_epochs=ratio(spec.max_epochs),
        plan=plan,
        view=view,
    )


def _compile_order(
    mixture: Mixture, sources: Sequence[LockSource], datasets: Mapping[str, Dataset]
) -> Order:
    sizes = [
        SourceSize(
            rows=source.rows,
            tokens=source.tokens,
            shards=len(datasets[source.name].manifest.shards),
        )
        for source in sources
    ]
    with located(mixture.values, "order"):
        return mixture.order.compile(sizes)


def _relative(data: str, manifest_folder: str, lock_folder: str) -> str:
    """Return the location that the lock records for `data` as written in the manifest."""
    if is_remote(data) or os.path.isabs(data):
        return data
    absolute = os.path.join(manifest_folder, data)
    if is_remote(lock_folder):
        return os.path.abspath(absolute)
    return Path(os.path.relpath(absolute, lock_folder)).as_posix()
