"""FAULTS rows 50 and 51: cached shards that are lost, and slow storage, while training."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.remote import S, remote_mixture
from support.runs import build_trainer
from support.store_proxy import Proxy, delay

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


def overrides(folder: Path) -> tuple[str, ...]:
    return (
        "--data_loader.global_batch_size=128",
        "--train_module.rank_microbatch_size=128",
        f"--data_loader.cache.folder={folder / 'cache'}",
        "--trainer.hard_stop={value: 12, unit: steps}",
        "--trainer.callbacks.lm_evaluator=null",
        "--train_module.scheduler={name: constant}",
    )


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_51_waiting_for_slow_storage_is_reported_apart_and_warned_of(
    proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"s3://{proxy.server['bucket']}/{tmp_path.name}/a"
    remote, _ = remote_mixture(tmp_path, url, order="windowed", window_chunks=1)
    proxy.inject(delay(0.02), key="tokens", method="GET", times=None)
    direct = ("--data_loader.cache.enabled=false", "--data_loader.prefetch=0")
    alarm = "--trainer.callbacks.speed_monitor.data_wait_alarm=0.001"
    build_trainer(remote, tmp_path / "slow", *overrides(tmp_path), *direct, alarm).fit()
    slow = [line for line in lines(tmp_path / "slow") if "throughput/data wait share" in line]
    assert slow
    for line in slow:
        seconds = line["throughput/data wait seconds"]
        assert seconds >= 8 * 0.02  # a step or more of 8 rows, each a request that is late
        assert 0.001 < line["throughput/data wait share"] < 1
    assert "for data: storage is slower than training" in capsys.readouterr().err


@pytest.mark.slow
def test_51_where_storage_is_lost_a_run_on_one_rank_saves_and_stops(
    proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"s3://{proxy.server['bucket']}/{tmp_path.name}/a"
    remote, _ = remote_mixture(tmp_path, url, order="windowed", window_chunks=1)
    trainer = build_trainer(
        remote,
        tmp_path / "run",
        *overrides(tmp_path)[:-3],
        "--trainer.callbacks.checkpointer.save_interval=1000",
        "--trainer.callbacks.lm_evaluator=null",
        "--train_module.scheduler={name: constant}",
        "--data_loader.cache.size_gb=0.000013",
        "--trainer.callbacks.speed_monitor.data_wait_alarm=1",
    )
    trainer.train_module.optimizer.register_step_post_hook(lambda *_: Store(url).clear())
    with pytest.raises(StorageError, match="not there any more") as caught:
        trainer.fit()
    assert caught.value.exit_code == 6
    assert 0 < trainer.step < trainer.stop_step
    assert list(trainer.checkpoints.saved) == [trainer.step]
    assert "storage is slower" not in capsys.readouterr().err
