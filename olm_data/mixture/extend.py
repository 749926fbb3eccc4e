"""A run that begins with the rows of an older one: the verb behind `mix --extend`.

    Lock, tokens --longer--> Lock: its last stage goes on
    Lock, rows, what comes then --continued--> Lock: `extends` names the older locks

The trainer goes on from a checkpoint of a lock that is named there. Proven before it is returned:
by structure (diff.same_rows) and by the order digest of rows sampled in both. `revise.py` begins
with other sources and stages somewhere in the run.
"""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any

import msgspec

from olm_data.counts import MAX_COUNT
from olm_data.errors import UsageError
from olm_data.mixture.compile_stages import rows_between
from olm_data.mixture.diff import same_rows
from olm_data.mixture.lock import Lock, split
from olm_data.mixture.lock_format import LockStage, OlderLock, manifest_stages
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
    default = older.removesuffix(".json").removesuffix(".lock") + "-longer.lock.json"
    output = beside(older, output or default)
    if dry_run:
        return MixResult(lock, output, "dry run")
    return MixResult(lock, output, lock.write(output, overwrite=overwrite))


def beside(older: str, output: str) -> str:
    """Return the path of a lock that goes on with the one at `older`.

    Raises:
        UsageError: it is no .json file in the folder of that one.
    """
    refuse_output(output, "--output", "file")
    if split(output)[0] != split(older)[0] or not output.endswith(".json"):
        raise UsageError(
            "the new lock must be a .json file beside the older one",
            where=output,
            why="it shares its row plans and relative locations",
            fix=f"--output {os.path.splitext(older)[0]}-longer.json",
        )
    return output


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
    longer = resized(lock, len(lock.stages) - 1, rows, total)
    _refuse_exhausted(lock, last.max_epochs, longer.rows_by_source, tokens, where)
    return continued(lock, lock.total_rows, stages=(*lock.stages[:-1], longer))


def resized(lock: Lock, index: int, rows: int, tokens: int) -> LockStage:
    """Return a stage of a lock with other numbers of rows and tokens, drawn in the same order."""
    stage = lock.stages[index]
    drawn = rows_by_source(Stage(rows, stage.counts), lock.schedule().table(index))
    return msgspec.structs.replace(stage, rows=rows, tokens=tokens, rows_by_source=drawn)


def continued(lock: Lock, rows: int, **changes: Any) -> Lock:
    """Return a lock with other values behind its first `rows` rows, which stay what they are.

    `extends` of it names `lock` and the older ones, each with the rows that all of them share.
    """
    own = OlderLock(digest=lock.digest, rows=rows, order_sha256="")
    shared = [
        msgspec.structs.replace(
            older, rows=end, order_sha256=schedule_sha256(lock.schedule(), sample_rows(end))
        )
        for older in (*lock.extends, own)
        for end in [min(older.rows, rows)]
    ]
    new = msgspec.structs.replace(lock, **changes, extends=tuple(shared), digest="")
    new = msgspec.structs.replace(new, digest=new.compute_digest())
    assert same_rows(lock, new) >= rows
    for older in shared:
        order = schedule_sha256(new.schedule(), sample_rows(older.rows))
        assert order == older.order_sha256
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
