"""The cache of remote shards: its size, what it gives up, what is fetched ahead and again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.polling import wait_until
from support.remote import SHARD, SHARDS, TOKENS, S, gets, loader, remote_mixture
from support.store_proxy import Proxy, cut_response, throttled

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ResourceError, StorageError, UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.rows import cache_plan
from olm_data.rows.cache_plan import CacheOptions, cache_need
from olm_data.rows.remote_shards import remote_shard
from olm_data.rows.shard_cache import NEVER, NextUses, ShardCache, victims
from olm_train.data import DataLoader


def test_a_small_cache_gives_the_rows_of_local_data_with_a_request_a_file(
    proxy: Proxy, url: str, tmp_path: Path
) -> None:
    remote, local = remote_mixture(tmp_path, url)
    need = cache_need(Lock.read(remote), Lock.read(remote).open_datasets())
    assert need.total == SHARDS * SHARD
    assert need.least < need.total / 1.5
    proxy.clear()
    cache = loader(remote, tmp_path / "cache", size=need.least)
    with cache, DataLoader(local, global_batch_size=8 * S, rank_microbatch_size=4 * S) as plain:
        for ours, theirs in zip(cache, plain, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(one.input_ids, other.input_ids)
                assert torch.equal(one.labels, other.labels)
                assert torch.equal(one.cu_seqlens, other.cu_seqlens)
            assert sum(cache._reader.remote.cache.sizes().values()) <= need.least
    # two epochs; a shard belongs to at most two chunks, which may come apart
    shards = sum("tokens" in path for path in gets(proxy))
    assert 2 * SHARDS <= shards <= 4 * SHARDS
    assert cache._reader.remote.fetched_again == 0


def test_ranks_that_share_a_cache_fetch_each_shard_once(
    proxy: Proxy, url: str, tmp_path: Path
) -> None:
    remote, _ = remote_mixture(tmp_path, url)
    proxy.clear()
    ranks = [
        DataLoader(
            remote,
            global_batch_size=8 * S,
            rank_microbatch_size=4 * S,
            rank=rank,
            world_size=2,
            neighbours=range(2),
            cache=CacheOptions(folder=str(tmp_path / "cache"), size=SHARDS * SHARD),
        )
        for rank in range(2)
    ]
    rows = [row for step in zip(*ranks, strict=True) for rank in step for row in rank[0].rows]
    assert [int(row) for row in rows] == list(range(len(rows)))
    assert sum("tokens" in path for path in gets(proxy)) == SHARDS
    for rank in ranks:
        rank.close()


def test_nothing_needed_sooner_is_given_up_for_what_is_fetched_ahead(
    proxy: Proxy, url: str, tmp_path: Path
) -> None:
    remote_mixture(tmp_path, url)
    dataset = Dataset.open(url)
    shards = [remote_shard(dataset, i) for i in range(4)]
    cache = ShardCache(tmp_path / "cache", 2 * SHARD)
    uses = {shards[0].key: 5, shards[1].key: 9}
    for shard in shards[:2]:
        cache.fetch(shard, lambda: uses)
    assert cache.fetch(shards[2], lambda: uses, later_than=9) is None
    assert cache.fetch(shards[2], lambda: uses, later_than=8) is not None
    assert set(cache.sizes()) == {shards[0].key, shards[2].key}
    assert cache.fetch(shards[3], dict) is not None  # needed now: anything may go


# Promises of looking ahead: the next use is known, and giving up the furthest misses least.
USES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=40)


@given(uses=USES, shard=st.integers(0, 9), step=st.integers(0, 32))
def test_the_next_use_is_the_first_one_not_before_the_step(
    uses: list[tuple[int, int]], shard: int, step: int
) -> None:
    known = NextUses([s for s, _ in uses], [n for _, n in uses])
    assert known.next_use(shard, step) == min(
        (s for s, n in uses if n == shard and s >= step), default=NEVER
    )
    order = known.in_order(step)
    assert set(order) == {n for s, n in uses if s >= step}
    assert [known.next_use(n, step) for n in order] == sorted(
        known.next_use(n, step) for n in order
    )


@given(
    sizes=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 9)),
    uses=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 9)),
    room=st.integers(-3, 40),
    later=st.integers(-1, 9),
)
def test_what_is_needed_last_goes_first_and_no_more_than_must(
    sizes: dict[str, int], uses: dict[str, int], room: int, later: int
) -> None:
    chosen = victims(sizes, uses, room, later)
    allowed = {name for name in sizes if uses.get(name, NEVER) > later}
    if chosen is None:
        assert sum(sizes[name] for name in allowed) < room
        return
    assert set(chosen) <= allowed
    assert sum(sizes[name] for name in chosen) >= room
    assert sum(sizes[name] for name in chosen[:-1]) < max(room, 1)
    kept = [uses.get(name, NEVER) for name in sizes if name not in chosen]
    assert all(uses.get(name, NEVER) >= max(kept, default=0) for name in chosen)


@given(accesses=st.lists(st.integers(0, 6), max_size=60), room=st.integers(1, 5))
def test_knowing_the_future_never_misses_more_than_least_recently_used(
    accesses: list[int], room: int
) -> None:
    known, cached, missed = NextUses(range(len(accesses)), accesses), set[int](), 0
    recent: list[int] = []
    missed_recent = 0
    for step, shard in enumerate(accesses):
        if shard not in cached:
            missed += 1
            uses = {str(n): known.next_use(n, step) for n in cached}
            gone = victims({str(n): 1 for n in cached}, uses, len(cached) + 1 - room, step)
            assert gone is not None
            cached -= {int(name) for name in gone}
            cached.add(shard)
        if shard in recent:
            recent.remove(shard)
        else:
            missed_recent += 1
            recent = recent[-(room - 1) :] if room > 1 else []
        recent.append(shard)
    assert missed <= missed_recent


@pytest.mark.parametrize(
    ("keys", "fix"),
    [({"order": "windowed", "window_chunks": 2}, "size_gb"), ({"order": "global"}, "windowed")],
)
def test_a_budget_that_is_too_small_is_refused_with_the_numbers(
    keys: dict[str, object], fix: str, url: str, tmp_path: Path
) -> None:
    remote, local = remote_mixture(tmp_path, url, **keys)
    lock = Lock.read(remote)
    least = cache_need(lock, lock.open_datasets()).least
    with pytest.raises(UsageError) as caught:
        loader(remote, tmp_path / "cache", size=least - 1)
    assert f"{least - 1:,} bytes; this mixture needs {least:,}" in str(caught.value)
    assert fix in str(caught.value.fix)
    assert loader(local, tmp_path / "cache", size=1).steps  # nothing to fetch, nothing to refuse


def test_a_disk_with_too_little_room_is_refused_with_the_numbers(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, _ = remote_mixture(tmp_path, url)
    monkeypatch.setattr(cache_plan, "free_bytes", lambda folder: 1234)
    with pytest.raises(ResourceError, match="1,234 are free"):
        loader(remote, tmp_path / "cache", size=1 << 40)


def test_killed_in_the_middle_of_a_download_the_next_process_clears_up_and_goes_on(
    proxy: Proxy, url: str, tmp_path: Path
) -> None:
    remote_mixture(tmp_path, url)
    proxy.clear()
    proxy.inject(throttled(200), key="tokens", times=1)
    code = (
        "import sys; from olm_data.dataset.dataset import Dataset;"
        "from olm_data.rows.remote_shards import remote_shard;"
        "from olm_data.rows.shard_cache import ShardCache;"
        "print('go', flush=True);"
        "ShardCache(sys.argv[1], 1 << 30).fetch(remote_shard(Dataset.open(sys.argv[2]), 0), dict)"
    )
    folder = tmp_path / "cache"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), url], env=os.environ, stdout=subprocess.PIPE
    )
    wait_until(lambda: list(folder.glob(".partial-*/*")), "a download under way")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(folder.glob(".partial-*/*"))
    cache = ShardCache(folder, 1 << 30)
    assert list(folder.glob(".partial-*")) == []
    dataset = Dataset.open(url)
    path = cache.fetch(remote_shard(dataset, 0), dict)
    assert path is not None
    copied = dataset.open_shard(0, copy=str(path)).read(0, TOKENS)
    assert np.array_equal(copied, dataset.read(0, TOKENS))


def test_what_arrives_wrong_is_fetched_once_more_and_then_refused(
    proxy: Proxy, url: str, tmp_path: Path
) -> None:
    remote_mixture(tmp_path, url)
    dataset = Dataset.open(url)
    wanted = remote_shard(dataset, 3)
    name = next(iter(wanted.files))
    cache = ShardCache(tmp_path / "cache", 1 << 30)
    proxy.inject(cut_response, key="tokens")  # a body that ends early is a request made again
    assert cache.fetch(wanted, dict) is not None
    cache.discard(wanted)
    good = dataset.store.read(name)
    dataset.store.put(name, good[:-2] + b"\0\0")
    with pytest.raises(ValidationError, match="is not the one that the manifest describes"):
        cache.fetch(wanted, dict)
    dataset.store.delete(name)
    with pytest.raises(StorageError, match="not there any more"):
        cache.fetch(wanted, dict)
    assert cache.sizes() == {}
    assert list((tmp_path / "cache").glob(".partial-*")) == []
