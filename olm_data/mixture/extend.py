"""A longer run that begins with the rows of an older one: the verb behind `mix --extend`.

    Lock, tokens --longer--> Lock: its last stage goes on; `extends` names the older lock

The trainer goes on from a checkpoint of a lock that is named there. Proven before it is returned:
by structure (diff.same_rows) and by the order digest of rows sampled in both.
"""

from __future__ import annotations

import os
from fractions import Fraction

import msgspec

from olm_data.counts import MAX_COUNT
from olm_data.errors import UsageError
from olm_data.mixture.compile_stages import rows_between
from olm_data.mixture.diff import same_rows
from olm_data.mixture.lock import Lock, split
from olm_data.mixture.lock_format import OlderLock, manifest_stages
from olm_data.mixture.mix import MANIFESTS, MixResult
from olm_data.order.schedule import Stage, rows_by_source, sample_rows, schedule_sha256
from olm_data.storage.output_paths import refuse_output


def extend(
    path: str, tokens: int, output: str | None, *, dry_run: bool = False, overwrite: bool = False
) -> MixResult:
    """Write a lock that goes on where the one at `path` ends, `tokens` tokens further.

    Args:
        path: a lock, or a manifest beside its lock.
        output: in the same folder (default: NAME-longer.lock.json).

    Raises:
        UsageError: the lock cannot go on so far, or `output` is in another folder.
        InputError, ValidationError: there is no lock, or it was changed.
        ConflictError: another lock is at `output` and `overwrite` is not set.
    """
    name, ending = os.path.splitext(path)
    older = name + ".lock.json" if ending in MANIFESTS else path
    lock = longer(Lock.read(older), tokens, older)
    if output is not None:
        refuse_output(output, "--output", "file")
    output = output or older.removesuffix(".json").removesuffix(".lock") + "-longer.lock.json"
    if split(output)[0] != lock.folder or not output.endswith(".json"):
        raise UsageError(
            "the longer lock must be a .json file beside the older one",
            where=output,
            why="it shares its row plans and relative locations",
            fix=f"--output {os.path.splitext(older)[0]}-longer.json",
        )
    if dry_run:
        return MixResult(lock, output, "dry run")
    return MixResult(lock, output, lock.write(output, overwrite=overwrite))


def longer(lock: Lock, tokens: int, where: str) -> Lock:
    """Return a lock whose last stage has `tokens` tokens more; `where` is the older lock's path.

    Raises:
        UsageError: the last stage is a fixed number of rows, the tokens add no row, or a source
            would be drawn beyond its `max_epochs`.
    """
    stage = manifest_stages(lock)[-1]
    if stage.exact:
        raise UsageError(
            f"the last stage, {stage.name!r}, has an exact number of rows of each source and "
            "cannot go on",
            where=where,
            why="it goes by epochs, or a source of it has given all that max_epochs allows",
            fix="add a stage to the manifest and run olm-data mix, or add one with weights and "
            "extend that",
        )
    last = lock.stages[-1]
    start = sum(earlier.tokens for earlier in lock.stages[:-1])
    length, total = lock.sequence_length, last.tokens + tokens
    rows = rows_between(start, start + total, length)
    if rows == last.rows or start + total > MAX_COUNT:
        raise UsageError(
            f"{tokens:,} more tokens give {rows - last.rows:,} more rows of {length:,}, "
            f"{start + total:,} tokens in all",
            where=where,
            fix=f"extend by at least {length:,} tokens, and to at most 2^62 in all",
        )
    drawn = rows_by_source(Stage(rows, last.counts), lock.schedule().table(len(lock.stages) - 1))
    last = msgspec.structs.replace(last, rows=rows, tokens=total, rows_by_source=drawn)
    _refuse_exhausted(lock, last.max_epochs, drawn, tokens, where)
    older = sample_rows(lock.total_rows)
    digest = schedule_sha256(lock.schedule(), older)
    new = msgspec.structs.replace(
        lock,
        stages=(*lock.stages[:-1], last),
        extends=(
            *lock.extends,
            OlderLock(digest=lock.digest, rows=lock.total_rows, order_sha256=digest),
        ),
        digest="",
    )
    new = msgspec.structs.replace(new, digest=new.compute_digest())
    assert same_rows(lock, new) == lock.total_rows
    assert schedule_sha256(new.schedule(), older) == digest
    return new


def _refuse_exhausted(
    lock: Lock, stage_caps: dict[str, str], drawn: tuple[int, ...], tokens: int, where: str
) -> None:
    """Raise where a source of the longer run is drawn beyond its cap."""
    length, last = lock.sequence_length, lock.stages[-1]
    for index, source in enumerate(lock.sources):
        before = sum(stage.rows_by_source[index] for stage in lock.stages[:-1])
        cap = int(source.rows * Fraction(source.max_epochs)) - before
        if source.name in stage_caps:
            cap = min(cap, int(source.rows * Fraction(stage_caps[source.name])))
        if drawn[index] <= cap:
            continue
        # a stage draws at most one row more than the exact share
        share = Fraction(last.counts[index], last.block)
        fits = max(int(Fraction(cap - 1) / share) * length - last.tokens, 0)
        raise UsageError(
            f"source {source.name!r} is exhausted: the longer run draws "
            f"{before + drawn[index]:,} rows, {(before + drawn[index]) / source.rows:.2f} epochs "
            f"of its {source.rows:,}; its caps allow {before + cap:,}",
            where=where,
            fix=f"extend by at most {fits:,} tokens instead of {tokens:,}, or raise max_epochs in "
            "the manifest, make a new lock and compare: olm-data mix --diff OLD NEW",
        )
