"""Locks of text that is still being tokenised (`order: arriving`): made at once, grown later.

    lock of some stages --begun--> group 1 --grown--> group 2 --grown--> ... all: complete
                                                 each group of shards extends the lock before it

Stages are whole from the beginning; what grows is how many rows of each source are there. A longer
lock follows from the shards alone, whoever makes it and when; its `extends` names the shorter ones,
each with the rows that need no later shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec

from olm_data.dataset.arrived import Group, read_group
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.mixture.diff import continued
from olm_data.mixture.lock import Lock, arrived_name
from olm_data.mixture.lock_format import LockSource
from olm_data.mixture.manifest import Mixture
from olm_data.order.arriving import Arriving, ArrivingKeys
from olm_data.packing.concat import rows_in
from olm_data.storage.store import Store, write_json


class NotArrived(InputError):
    """No shard of a source is there yet.

    Attributes:
        places: where its dataset will be.
    """

    places: tuple[str, ...] = ()


def first_group(store: Store) -> Group:
    """Return the first group of a dataset.

    Raises:
        NotArrived: it is still to be written.
    """
    found = read_group(store, 1)
    if found is None:
        error = NotArrived(
            "no shard of this dataset is there yet",
            where=store.root,
            fix="begin to tokenise into it, or run this again when its first shard is there",
        )
        error.places = (store.root,)
        raise error
    return found


def refuse_counted(mixture: Mixture) -> None:
    """Refuse stages whose rows depend on how much text there is.

    Raises:
        UsageError: there is one, with `order: arriving`.
    """
    if not isinstance(mixture.order, ArrivingKeys):
        return
    for index, stage in enumerate(mixture.stages):
        if stage.epochs or stage.max_epochs or mixture.on_exhausted != "error":
            raise UsageError(
                f"stage {stage.name!r} depends on how much text there is: epochs, max_epochs of a "
                "stage and on_exhausted do",
                where=mixture.where("stages", index),
                why="with order: arriving that is not known before the text has been tokenised",
                fix="give the stage tokens and weights, and leave on_exhausted out",
            )


def begun(lock: Lock) -> Lock:
    """Return a lock of first groups, with what they say of the groups; of other orders, itself."""
    if not isinstance(lock.order, Arriving):
        return lock
    groups = {i: first_group(Store(lock.location(s.name))) for i, s in enumerate(lock.sources)}
    begun = msgspec.structs.replace(lock, order=_order(lock, groups))
    _refuse_exhausted(begun)
    return begun


def as_far_as_there(lock: Lock) -> Lock:
    """Return the lock with all groups that are there; itself where none follows.

    Raises:
        UsageError: all text is there, and a source is drawn beyond its `max_epochs`.
        ValidationError: the shards of a dataset are not those that the lock was made from.
    """
    while (longer := grown(lock)) is not None:
        lock = longer
    return lock


def grown(lock: Lock) -> Lock | None:
    """Return the lock with the next group of each source; None where one is not there yet."""
    order, groups = lock.order, dict[int, Group]()
    if lock.complete or not isinstance(order, Arriving):
        return None
    for index, source in enumerate(lock.sources):
        if order.ended[index]:
            continue
        group = read_group(Store(lock.location(source.name)), len(order.bounds[index]) + 1)
        if group is None:
            return None
        _refuse_other(lock, index, group)
        groups[index] = group
    sources = [
        _grown(source, groups[index], lock.sequence_length) if index in groups else source
        for index, source in enumerate(lock.sources)
    ]
    longer = continued(lock, lock.rows_there(), sources=tuple(sources), order=_order(lock, groups))
    _refuse_exhausted(longer)
    return longer


def publish_arrived(lock: Lock) -> None:
    """Write the manifests of unfinished datasets beside the lock that names them."""
    for index, source in enumerate(lock.sources):
        if not lock.order.is_complete(index) and isinstance(lock.order, Arriving):
            number = len(lock.order.bounds[index])
            group = read_group(Store(lock.location(source.name)), number)
            assert group is not None
            assert group.manifest.digest == source.dataset
            write_json(Store(lock.folder), arrived_name(source.dataset), group.manifest.encode())


def _order(lock: Lock, groups: Mapping[int, Group]) -> Arriving:
    order, length = lock.order, lock.sequence_length
    assert isinstance(order, Arriving)
    bounds, ended = [*order.bounds], [*order.ended]
    for index, group in groups.items():
        bounds[index] = tuple(rows_in(tokens, length) for tokens in group.token_ends())
        ended[index] = group.ended
    return Arriving(bounds=tuple(bounds), ended=tuple(ended))


def _grown(source: LockSource, group: Group, length: int) -> LockSource:
    manifest = group.manifest
    return msgspec.structs.replace(
        source,
        dataset=str(manifest.digest),
        tokens=manifest.totals.tokens,
        documents=manifest.totals.documents,
        rows=rows_in(manifest.totals.tokens, length),
        max_documents_per_row=manifest.documents_bound(length),
        trained=manifest.trained,
    )


def _refuse_other(lock: Lock, index: int, group: Group) -> None:
    """Refuse a dataset whose first shards are others than the lock was made from."""
    order, source, length = lock.order, lock.sources[index], lock.sequence_length
    assert isinstance(order, Arriving)
    before = read_group(Store(lock.location(source.name)), len(order.bounds[index]))
    assert before is not None
    shards: Sequence[object] = before.manifest.shards
    if before.manifest.digest != source.dataset or group.manifest.shards[: len(shards)] != shards:
        raise ValidationError(
            f"the first shards of source {source.name!r} are not those in the lock",
            where=lock.location(source.name),
            why=f"its first {rows_in(source.tokens, length):,} rows would be other tokens",
            fix="tokenise the same text with the same options, or run olm-data mix for a new lock, "
            "and a new run",
        )


def _refuse_exhausted(lock: Lock) -> None:
    for index, source in enumerate(lock.sources):
        drawn, cap = lock.rows_drawn(index), int(source.rows * Fraction(source.max_epochs))
        if lock.order.is_complete(index) and drawn > cap:
            length = lock.sequence_length
            raise UsageError(
                f"source {source.name!r} is exhausted: the stages draw {drawn:,} rows, "
                f"{drawn / source.rows:.2f} epochs of its {source.rows:,}; max_epochs allows "
                f"{cap:,}",
                where=lock.location(source.name),
                why="how much text there is was not known before all of it was tokenised",
                fix=f"add {(drawn - cap) * length:,} tokens or more with olm-data add and go on; "
                "or give the stages fewer tokens, or the source a higher max_epochs, and begin a "
                "new run",
            )
