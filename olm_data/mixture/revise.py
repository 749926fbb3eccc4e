"""A run that goes on with other sources, weights and stages: the verb behind `mix --revise`.

    run | checkpoint | tokens --rows_at--> R       Lock, manifest.yaml --MixPlan.open--> MixPlan
    Lock: stages up to row R, MixPlan: the stages that follow --revised--> Lock

The rows before R stay; each source goes on where it stands, so that none of its rows is repeated or
lost. `extends` names the older locks with the rows that all share (`diff.continued`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import msgspec

from olm_data.counts import MAX_COUNT, counted, parse_count
from olm_data.dataset.manifest import read_manifest
from olm_data.errors import UsageError, ValidationError, typed
from olm_data.mixture.compile_stages import compile_stages, refuse_exhausted, rows_between
from olm_data.mixture.diff import continued
from olm_data.mixture.lock import Lock, split
from olm_data.mixture.lock_format import LockSource, LockStage
from olm_data.mixture.manifest import Mixture
from olm_data.mixture.mix import MANIFESTS, MixPlan, MixResult
from olm_data.order.schedule import ScheduleStage, rows_by_source
from olm_data.path_kinds import require
from olm_data.run_log.run_folder import read_position
from olm_data.storage.output_paths import refuse_output
from olm_data.storage.store import is_remote


def revise(
    path: str,
    at: str,
    manifest: str,
    output: str | None = None,
    *,
    dry_run: bool = False,
    overwrite: bool = False,
) -> MixResult:
    """Write a lock that is the one at `path` up to a place, and goes on as `manifest` says.

    Args:
        path: a lock.
        at: a run folder (its last checkpoint), a checkpoint of it, or tokens from the beginning.
        output: in the folder of the lock (default: NAME.lock.json, the manifest's name).

    Raises:
        UsageError: the manifest does not go on with the lock, or there is no such place in it.
        InputError, ValidationError: the lock, the run or the data are refused.
        ConflictError: another lock is at `output` and `overwrite` is not set.
    """
    old = Lock.read(path)
    rows = rows_at(old, at)
    name = os.path.splitext(os.path.basename(manifest))[0] + ".lock.json"
    output = beside(path, output or os.path.join(os.path.dirname(path), name))
    drawn = _drawn(old, _kept(old, rows))
    locked = {name: old.sources[index].dataset for name, index in drawn.items()}
    plan = MixPlan.open(manifest, old.folder, old, locked)
    left = {name: old.open_dataset(i) for name, i in drawn.items() if name not in plan.datasets}
    done = replace(plan, datasets={**plan.datasets, **left}).write(
        output, lambda packed: revised(packed, old, rows), dry_run=dry_run, overwrite=overwrite
    )
    grown = [
        f"source {name!r} has grown since; the run goes on with the version in the lock: name the "
        f"new one anew, as {name}-2 with the same data, and what was drawn of it may come again"
        for name in locked
        if name not in left
        and read_manifest(plan.datasets[name].store).digest != plan.datasets[name].digest
    ]
    return replace(done, warnings=(*done.warnings, *grown))


def rows_at(lock: Lock, at: str) -> int:
    """Return the rows of a lock up to a place in its run: the last whole one before it.

    Args:
        at: a run folder (its last checkpoint), a checkpoint of it, or tokens from the beginning.

    Raises:
        UsageError: it is before the first row or behind the last, or no number.
        ValidationError: the run was trained on other rows.
        InputError: there is no checkpoint.
    """
    length = lock.sequence_length
    if at[:1].isdigit() and not is_remote(at) and not os.path.lexists(at):
        rows = parse_count(at, "--at") // length
    else:
        require(at, "run", "checkpoint", "folder")
        place = read_position(at)
        rows = place.rows
        if place.lock not in lock.digests(rows):
            raise ValidationError(
                f"the run has trained on another mixture: {counted(rows, 'row')} of lock "
                f"{place.lock[:12]}, and this is {lock.digest[:12]}",
                where=place.folder,
                why="where its sources stand is not known from this lock",
                fix="revise the lock it is trained with, a copy of which is in the checkpoint: "
                "data_loader.mixture in its config.json says where it is",
            )
    if not 0 < rows <= lock.total_rows:
        raise UsageError(
            f"{at} is at row {rows:,}; a run of the lock goes from row 0 to {lock.total_rows:,}",
            where="--at",
            fix=f"give {length:,} to {lock.total_rows * length:,} tokens; what begins at 0 is a "
            "mixture of its own: olm-data mix manifest.yaml",
        )
    return rows


def revised(plan: MixPlan, old: Lock, rows: int) -> Lock:
    """Return the lock of the first `rows` rows of `old` and the stages of a manifest behind them.

    Raises:
        UsageError: the manifest differs from the lock in what makes its rows, names a source or
            stage of it otherwise than it is, or a source would be drawn beyond its `max_epochs`.
        ValidationError: another tokenizer made the new sources.
        InputError: a source has no whole row.
    """
    mixture, new, kept = plan.mixture, plan.without_stages(), _kept(old, rows)
    _refuse_other_run(mixture, old, new)
    was, now = _drawn(old, kept), {source.name: i for i, source in enumerate(new.sources)}
    for name in was.keys() & now.keys():
        _refuse_other_source(mixture, old.sources[was[name]], new.sources[now[name]])
    names = sorted({*was, *now})
    sources = [new.sources[now[n]] if n in now else old.sources[was[n]] for n in names]
    parts = [
        old.order.for_source(was[n]) if n in was else new.order.for_source(now[n]) for n in names
    ]
    order = parts[0].join(parts[1:])
    if [*map(order.for_source, range(len(names)))] != parts or not order.fits(
        [source.rows for source in sources]
    ):
        raise UsageError(
            f"order {order.name} is another one in the lock, or not one of these sources",
            where=mixture.where("order"),
            fix="leave order and its keys out: the lock knows them",
        )
    kept = [_among(stage, [was.get(name) for name in names]) for stage in kept]
    stages = compile_stages(mixture, sources, kept)
    refuse_exhausted(mixture, sources, stages, len(kept))
    if sum(stage.tokens for stage in stages) > MAX_COUNT:
        raise UsageError("the run has more than 2^62 tokens", where=mixture.where("stages"))
    return continued(
        old,
        rows,
        sources=tuple(sources),
        stages=stages,
        order=order,
        locations={n: (new if n in now else old).locations[n] for n in names},
        tools=new.tools,
    )


def standing(lock: Lock) -> list[str]:
    """Return where each source of a revised lock stands, in words, as the revision begins."""
    schedule, rows = lock.schedule(), lock.extends[-1].rows
    lines = []
    for name, drawn, turn in zip(
        schedule.names, schedule.drawn_before(rows), schedule.epoch_rows, strict=True
    ):
        epoch, row = divmod(int(drawn), int(turn))
        where = f"goes on at row {row:,} of {turn:,} of its epoch {epoch + 1:,}"
        lines.append(f"source {name}: {where if drawn else f'new, {turn:,} rows'}")
    return lines


def _kept(lock: Lock, rows: int) -> list[LockStage]:
    """Return the stages of the first `rows` rows; the last one is cut where they end in it."""
    kept: list[LockStage] = []
    tokens = 0
    for index, stage in enumerate(lock.stages):
        here = rows - sum(earlier.rows for earlier in kept)
        if here <= 0:
            break
        if here < stage.rows:
            stage = resized(lock, index, here, rows * lock.sequence_length - tokens)
        kept.append(stage)
        tokens += stage.tokens
    return kept


def _drawn(lock: Lock, kept: Sequence[LockStage]) -> dict[str, int]:
    """Return the index of each source that is in the blocks of some stages, by name."""
    return {
        source.name: index
        for index, source in enumerate(lock.sources)
        if any(stage.counts[index] for stage in kept)
    }


def _among(stage: LockStage, index: Sequence[int | None]) -> LockStage:
    """Return a stage among other sources. Args: index: that of each in the stage, None: not in."""

    def spread(values: Sequence[Any], nothing: Any) -> tuple[Any, ...]:
        return tuple(nothing if i is None else values[i] for i in index)

    return msgspec.structs.replace(
        stage,
        counts=spread(stage.counts, 0),
        wanted=spread(stage.wanted, "0/1"),
        rows_by_source=spread(stage.rows_by_source, 0),
        epochs=spread(stage.epochs, "0/1") if stage.epochs else (),
    )


def _refuse_other_run(mixture: Mixture, old: Lock, new: Lock) -> None:
    for key, before, now in (
        ("seed", old.seed, new.seed),
        ("sequence_length", old.sequence_length, new.sequence_length),
        ("packing", old.packing.name, new.packing.name),
        ("order", old.order.name, new.order.name),
    ):
        if before != now:
            raise UsageError(
                f"{key} is {now}, in the lock it is {before}",
                where=mixture.where(key),
                why="the rows that stay would be others",
                fix=f"leave {key} out: the lock knows it",
            )
    if what := old.tokenizer.difference(new.tokenizer, ends=True):
        raise ValidationError(
            f"the sources were made by another tokenizer than those of the lock: {what} is "
            f"{getattr(new.tokenizer, what)}, in the lock {getattr(old.tokenizer, what)}",
            where=mixture.where("sources"),
            why="the same id would mean different text before and after",
            fix="tokenise them with the tokenizer of the lock's datasets; they hold a copy",
        )


def _refuse_other_source(mixture: Mixture, old: LockSource, new: LockSource) -> None:
    differences = [
        f"{key} {getattr(new, key)}, in the lock {getattr(old, key)}"
        for key in new.__struct_fields__
        if key != "max_epochs" and getattr(new, key) != getattr(old, key)
    ]
    if differences:
        raise UsageError(
            f"source {old.name!r} is another one than in the lock: " + "; ".join(differences),
            where=mixture.where("sources", old.name),
            why="which of its rows were drawn would mean nothing, so some would repeat or be lost",
            fix=f"give it another name, such as {typed(old.name)}-2: it begins with its first row, "
            "so documents that the old one drew may come again",
        )


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
    stage = lock.manifest_stages[-1]
    if stage.exact:
        raise UsageError(
            f"the last stage, {stage.name!r}, has an exact number of rows of each source and "
            "cannot go on",
            where=where,
            why="it goes by epochs, its weights ramp, or a source of it has given all that "
            "max_epochs allows",
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
    drawn = rows_by_source(ScheduleStage(rows, stage.counts), lock.schedule().table(index))
    return msgspec.structs.replace(stage, rows=rows, tokens=tokens, rows_by_source=drawn)


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
