"""A remote shard arrives whole and checked, whatever happens on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.polling import wait_until
from support.remote import TOKENS, remote_mixture
from support.store_proxy import Proxy, cut_response, throttled

from olm_data.dataset.dataset import Dataset
from olm_data.errors import StorageError, ValidationError
from olm_data.rows.remote_shards import remote_shard
from olm_data.rows.shard_cache import ShardCache


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
