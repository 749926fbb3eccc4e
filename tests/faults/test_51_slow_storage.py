"""FAULTS row 51: slow storage shows as waiting for data, apart from training, and is warned of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.remote import remote_mixture
from support.runs import build_trainer
from support.store_proxy import Proxy, delay

from olm_data.errors import StorageError
from olm_data.storage.store import Store


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
