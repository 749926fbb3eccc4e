"""Documents that two sources of a mixture both have, told by their manifests.

    manifests --token files of the same digest--> shards in common --masks of views--> counted
              `--`content` of the same texts----> all of the smaller dataset

`max_epochs` counts the rows of each source apart, so what two sources share may be seen more often
than it says; and a model is measured on nothing new by a held-out set that is trained on, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations, product

import msgspec
import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import Manifest, ShardInfo
from olm_data.dataset.view import View
from olm_data.mixture.lock import Lock

_SAID = 8
"""Pairs of sources that are named one by one."""

_Place = tuple[str, int]
"""Name of a source, and number of a shard of it."""


class Common(msgspec.Struct, frozen=True):
    """Documents and tokens that two datasets both have."""

    documents: int
    tokens: int

    def __add__(self, other: Common) -> Common:
        return Common(self.documents + other.documents, self.tokens + other.tokens)

    def __str__(self) -> str:
        return f"{self.documents:,} documents ({self.tokens:,} tokens)"


NOTHING = Common(0, 0)


def in_common(one: Manifest, other: Manifest) -> Common:
    """Return what two datasets are known to share: shards, or all texts of the smaller one."""
    there = {_key(shard) for shard in other.shards}
    same = [shard for shard in one.shards if _key(shard) in there]
    if same:
        return Common(sum(s.documents for s in same), sum(s.tokens for s in same))
    return _same_texts(one, other)


def warnings_of_sources(datasets: Mapping[str, Dataset], views: Mapping[str, View]) -> list[str]:
    """Return a sentence for each pair of sources that share documents.

    Args:
        datasets: of each source, by name.
        views: of the sources that have one, by name.

    Raises:
        ValidationError, InputError: document rows that a view needs are damaged.
    """
    shared = _by_shards(datasets, views)
    named: dict[str, list[str]] = defaultdict(list)
    for name, dataset in datasets.items():
        copies = dataset.manifest.tools.copies
        if name not in views and copies is not None and copies.content is not None:
            named[copies.content].append(name)
    for names in named.values():
        for pair in combinations(names, 2):
            if pair not in shared:
                shared[pair] = _same_texts(*(datasets[name].manifest for name in pair))
    said = [
        f"sources {first!r} and {second!r} share {common}: max_epochs counts each source apart, so "
        "the run may repeat these more often than either allows"
        for (first, second), common in sorted(shared.items())
        if common.documents
    ]
    more = len(said) - _SAID
    return said[:_SAID] + ([f"{more:,} more pairs of sources share documents"] if more > 0 else [])


def warnings_of_held_out(
    held_out: Mapping[str, Dataset], lock: Lock, datasets: Sequence[Dataset]
) -> list[str]:
    """Return a sentence for each source of a training that has documents of a held-out dataset.

    Args:
        held_out: held-out datasets, by name.
        lock: of the training.
        datasets: of the lock's sources, in their order.
    """
    found = []
    for (name, ours), (index, source) in product(held_out.items(), enumerate(lock.sources)):
        common = in_common(ours.manifest, datasets[index].manifest)
        if common.documents and lock.rows_drawn(index):
            drawn = "a view of it" if source.view is not None else "it"
            found.append(
                f"{common} of the held-out data set {name!r} are in source {source.name!r}, too, "
                f"and training draws on {drawn}: a loss on them is not that of new text"
            )
    return found


def _key(shard: ShardInfo) -> tuple[str, str]:
    return shard.sha256["tokens"], shard.sha256["ends"]


def _same_texts(one: Manifest, other: Manifest) -> Common:
    """Return the smaller of two datasets, if it is known to be made of texts of the other."""
    of_one, of_other = (manifest.tools.copies for manifest in (one, other))
    if of_one is None or of_other is None or of_one.content is None:
        return NOTHING
    # `content` is that of both splits together: the same split of both, or one that is all of it
    nested = one.split == other.split or 0 in (one.totals.other_split, other.totals.other_split)
    if of_one.content != of_other.content or not nested:
        return NOTHING
    smaller = min(one.totals, other.totals, key=lambda totals: totals.documents)
    return Common(smaller.documents, smaller.tokens)


def _by_shards(
    datasets: Mapping[str, Dataset], views: Mapping[str, View]
) -> dict[tuple[str, str], Common]:
    """Return what the sources of each pair draw on both, of the shards that both have."""
    holders: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for name, dataset in datasets.items():
        for number, shard in enumerate(dataset.manifest.shards):
            holders[_key(shard)].setdefault(name, number)
    found: dict[tuple[str, str], Common] = defaultdict(lambda: NOTHING)
    for places in holders.values():
        if len(places) > 1:
            for pair, common in _of_shard(list(places.items()), datasets, views).items():
                found[pair] += common
    return dict(found)


def _of_shard(
    places: Sequence[_Place], datasets: Mapping[str, Dataset], views: Mapping[str, View]
) -> dict[tuple[str, str], Common]:
    """Return what each pair of sources draws on both, of one shard that all of them have."""
    names = [name for name, _ in places]
    whole = datasets[names[0]].manifest.shards[places[0][1]]
    pairs = list(combinations(range(len(names)), 2))
    if not any(name in views for name in names):
        common = Common(whole.documents, whole.tokens)
        return {(names[i], names[j]): common for i, j in pairs}
    shard = datasets[names[0]].open_shard(places[0][1])
    masks = np.ones((len(names), whole.documents), bool)
    for mask, (name, number) in zip(masks, places, strict=True):
        if name in views:
            dataset = datasets[name]
            for first, kept in views[name].over(dataset).chosen(number, dataset.open_shard(number)):
                mask[first : first + len(kept)] = kept
    several = masks.sum(0) > 1  # mostly none: conditions part a dataset
    masks, lengths = masks[:, several], np.diff(shard.ends.astype(np.int64), prepend=0)[several]
    both = {(names[i], names[j]): masks[i] & masks[j] for i, j in pairs}
    return {pair: Common(int(mask.sum()), int(lengths[mask].sum())) for pair, mask in both.items()}
