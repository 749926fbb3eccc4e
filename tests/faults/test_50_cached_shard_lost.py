"""FAULTS row 50: a cached shard vanishes, is cut short or changes while training."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.remote import S, remote_mixture
from support.store_proxy import Proxy

from olm_data.errors import StorageError
from olm_data.rows.cache_plan import CacheOptions
from olm_data.storage.store import Store
from olm_train.data import DataLoader


def damage(folder: Path, how: str) -> int:
    """Do it to every cached shard; return to how many."""
    shards = [path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
    for shard in shards:
        (tokens,) = shard.glob("*.tokens.npy")
        if how == "removed":
            shutil.rmtree(shard)
        elif how == "unlinked":
            tokens.unlink()
        elif how == "cut short":
            os.truncate(tokens, 300)
        else:
            data = bytearray(tokens.read_bytes())
            data[500:] = bytes(len(data) - 500)
            tokens.write_bytes(data)
    return len(shards)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["removed", "unlinked", "cut short", "overwritten"])
def test_50_it_is_fetched_again_and_said_and_no_token_differs(
    how: str, proxy: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote, local = remote_mixture(tmp_path, f"s3://{proxy.server['bucket']}/{tmp_path.name}/a")
    sizes = {"global_batch_size": 8 * S, "rank_microbatch_size": 8 * S, "prefetch": 0}
    cached = DataLoader(remote, cache=CacheOptions(folder=str(tmp_path / "cache")), **sizes)
    plain = DataLoader(local, **sizes)
    steps = zip(cached, plain, strict=False)
    with cached, plain, caplog.at_level(logging.WARNING):
        for _ in range(10):
            next(steps)
        assert damage(tmp_path / "cache", how)
        for _ in range(30):
            (ours,), (theirs,) = next(steps)
            assert torch.equal(ours.input_ids, theirs.input_ids)
            assert torch.equal(ours.labels, theirs.labels)
    again = [text for text in caplog.messages if "lost and is fetched again" in text]
    assert len(again) >= 1
    assert "(1 so far)" in again[0]


def test_50_where_it_cannot_be_had_again_the_run_stops_with_exit_6(
    proxy: Proxy, tmp_path: Path
) -> None:
    url = f"s3://{proxy.server['bucket']}/{tmp_path.name}/a"
    remote, _ = remote_mixture(tmp_path, url)
    loader = DataLoader(
        remote,
        global_batch_size=8 * S,
        rank_microbatch_size=8 * S,
        cache=CacheOptions(folder=str(tmp_path / "cache")),
    )
    with loader:
        steps = iter(loader)
        next(steps)
        Store(url).clear()
        damage(tmp_path / "cache", "removed")
        with pytest.raises(StorageError, match="not there any more") as caught:
            for _ in steps:
                pass
        assert caught.value.exit_code == 6
        assert loader.state_dict()["rows_consumed"] == 8 * loader.step  # of the last good step
