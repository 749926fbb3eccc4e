"""Compile a mixture manifest against real datasets: exact shares become rows, blocks and a lock.

    manifest.yaml --manifest--> Mixture --open_sources--> datasets
                                       |                          |
                                       +------compile_lock--------+--> Lock (lock.py)

Everything impossible is refused here, with the numbers, before training starts: mixed tokenizers, a
source without a whole row, a stage shorter than a row, a source drawn beyond its `max_epochs`.
Never: read tokens, or write anything.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import msgspec

from olm_data import __version__
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import TokenizerInfo
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.mixture.lock import FORMAT, VERSION, Lock, LockSource, LockStage, LockTokenizer
from olm_data.mixture.manifest import Mixture, SourceSpec, parse_mixture, read_mixture
from olm_data.mixture.order import VERSION as ORDER
from olm_data.mixture.order import Stage, rows_by_source
from olm_data.mixture.pack import PlanInfo
from olm_data.mixture.packing import rows_between, rows_in
from olm_data.mixture.shares import compile_shares, slot_table
from olm_data.storage.store import is_remote

__all__ = ["Lock", "Mixture", "compile_lock", "open_sources", "parse_mixture", "read_mixture"]


def open_sources(mixture: Mixture) -> dict[str, Dataset]:
    """Open the dataset of each source of a manifest: source name -> dataset.

    Raises:
        InputError: there is no dataset at a source's `data`; the message has the manifest's line.
    """
    datasets = {}
    for source in mixture.sources:
        try:
            datasets[source.name] = Dataset.open(mixture.location(source))
        except InputError as error:
            line = mixture.where("sources", source.name, "data")
            raise InputError(
                error.what, where=f"{error.where} (from {line})", why=error.why, fix=error.fix
            ) from None
    return datasets


def compile_lock(
    mixture: Mixture,
    datasets: Mapping[str, Dataset],
    folder: str = "",
    plans: Mapping[str, PlanInfo] | None = None,
) -> Lock:
    """Compile a manifest against its datasets.

    Args:
        mixture: the parsed manifest.
        datasets: one for each source, by name.
        plans: the row plan of each source, by name, where the packing needs them.
        folder: where the lock will lie (default: the manifest's folder).

    Raises:
        ValidationError: the sources were made by different tokenizers.
        InputError: a source has no whole row.
        UsageError: a stage without a row, or a source drawn beyond its `max_epochs`.
    """
    tokenizer = _one_tokenizer(mixture, datasets)
    sources = tuple(
        _compile_source(mixture, spec, datasets[spec.name], (plans or {}).get(spec.name))
        for spec in mixture.sources
    )
    stages = _compile_stages(mixture)
    _refuse_exhausted(mixture, sources, stages)
    folder = folder or mixture.folder
    lock = Lock(
        format=FORMAT,
        version=VERSION,
        order=ORDER,
        seed=mixture.seed,
        sequence_length=mixture.sequence_length,
        packing=mixture.packing,
        tokenizer=LockTokenizer(
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
    )
    return msgspec.structs.replace(lock, digest=lock.compute_digest())


def _one_tokenizer(mixture: Mixture, datasets: Mapping[str, Dataset]) -> TokenizerInfo:
    first, *others = (source.name for source in mixture.sources)
    ours, our_name = datasets[first].manifest.tokenizer, datasets[first].tokenizer_name
    for name in others:
        theirs, their_name = datasets[name].manifest.tokenizer, datasets[name].tokenizer_name
        for what in ("sha256", "probe_sha256", "vocab_size", "bos", "eos"):
            if getattr(ours, what) != getattr(theirs, what):
                raise ValidationError(
                    f"sources {first!r} and {name!r} were made by different tokenizers: {what} is "
                    f"{getattr(ours, what)} ({our_name}) and {getattr(theirs, what)} "
                    f"({their_name})",
                    where=mixture.where("sources", name),
                    why="the same id would mean different text in the two sources",
                    fix="tokenise both with the same tokenizer and options",
                )
    return ours


def _compile_source(
    mixture: Mixture, spec: SourceSpec, dataset: Dataset, plan: PlanInfo | None
) -> LockSource:
    length = mixture.sequence_length
    rows = rows_in(dataset.tokens, length) if plan is None else plan.rows
    if not rows:
        raise InputError(
            f"source {spec.name!r} has {dataset.tokens:,} tokens; one row takes {length + 1:,} "
            f"(sequence_length {length:,} and the token that follows)",
            where=mixture.where("sources", spec.name),
            fix="tokenise more text for it, or lower sequence_length, or remove the source",
        )
    bound = dataset.manifest.documents_bound(length) if plan is None else plan.most_pieces
    return LockSource(
        name=spec.name,
        dataset=dataset.digest,
        tokens=dataset.tokens,
        documents=dataset.documents,
        rows=rows,
        dtype=dataset.dtype.name,
        max_documents_per_row=bound,
        max_epochs=_ratio(spec.max_epochs),
        plan=plan,
    )


def _compile_stages(mixture: Mixture) -> tuple[LockStage, ...]:
    stages: list[LockStage] = []
    start = 0
    for index, spec in enumerate(mixture.stages):
        rows = rows_between(start, start + spec.tokens, mixture.sequence_length)
        start += spec.tokens
        if not rows:
            raise UsageError(
                f"stage {spec.name!r} has {spec.tokens:,} tokens, less than one row of "
                f"{mixture.sequence_length:,}",
                where=mixture.where("stages", index),
                fix="give the stage more tokens, or lower sequence_length",
            )
        shares = [spec.shares.get(source.name, Fraction(0)) for source in mixture.sources]
        counts = compile_shares(shares).counts
        stages.append(
            LockStage(
                name=spec.name,
                rows=rows,
                tokens=spec.tokens,
                block=sum(counts),
                counts=counts,
                wanted=tuple(map(_ratio, shares)),
                rows_by_source=rows_by_source(Stage(rows, counts), slot_table(counts)),
            )
        )
    return tuple(stages)


def _refuse_exhausted(
    mixture: Mixture, sources: Sequence[LockSource], stages: Sequence[LockStage]
) -> None:
    """Raise when a source is drawn beyond its cap, with the numbers and what would make it fit."""
    length, total = mixture.sequence_length, sum(stage.tokens for stage in mixture.stages)
    problems, raised, lowered, places = [], [], [], []
    fits = Fraction(total)
    for index, source in enumerate(sources):
        drawn = sum(stage.rows_by_source[index] for stage in stages)
        cap = int(source.rows * Fraction(source.max_epochs))
        if drawn <= cap:
            continue
        problems.append(
            f"source {source.name!r} is exhausted: the stages draw {drawn:,} rows "
            f"({drawn * length:,} tokens), {drawn / source.rows:.2f} epochs of its "
            f"{source.rows:,} rows; max_epochs {float(Fraction(source.max_epochs)):g} allows "
            f"{cap:,} rows"
        )
        places.append(mixture.where("sources", source.name, "max_epochs"))
        raised.append(f"max_epochs: {math.ceil(Fraction(drawn, source.rows))} for {source.name!r}")
        lowered.append(f"at most {cap * length:,} tokens of {source.name!r}")
        # each stage may draw one row more than its exact share
        fits = min(fits, Fraction(total * max(cap - len(stages), 0), drawn))
    if problems:
        raise UsageError(
            "\n".join(problems),
            where=", ".join(places),
            why="on_exhausted is `error`: a run never repeats data more often than you allowed",
            fix=f"set {', '.join(raised)}; or draw {', '.join(lowered)} (lower the weight, or "
            f"shorten the run to about {int(fits):,} tokens)",
        )


def _relative(data: str, manifest_folder: str, lock_folder: str) -> str:
    """Return the location that the lock records for `data` as written in the manifest."""
    if is_remote(data) or os.path.isabs(data):
        return data
    absolute = os.path.join(manifest_folder, data)
    if is_remote(lock_folder):
        return os.path.abspath(absolute)
    return Path(os.path.relpath(absolute, lock_folder)).as_posix()


def _ratio(value: Fraction) -> str:
    return f"{value.numerator}/{value.denominator}"
