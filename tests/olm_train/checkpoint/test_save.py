"""A save folder on S3: checkpoints and logs go there, and the run goes on from there anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.runs import build_trainer, metrics, same_bits, tensors
from support.store_proxy import Proxy, answer, reset

from olm_data.errors import UsageError
from olm_data.storage.store import Store
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.load import newest_checkpoint, open_checkpoint
from olm_train.checkpoint.manifest import MANIFEST, candidates, partial_folders
from olm_train.distributed.world import World
from olm_train.extensions.hf_export.command import main as export
from olm_train.trainer import Trainer

OPTIONS = (
    "--trainer.callbacks.lm_evaluator.enabled=false",
    "--trainer.callbacks.checkpointer={save_interval: 4, ephemeral_save_interval: 1}",
)


@pytest.fixture
def bucket(s3: dict[str, str], request: pytest.FixtureRequest) -> str:
    return f"s3://{s3['bucket']}/{request.node.name}"


def build(lock: Path, folder: str, work: Path, stop: int, *more: str) -> Trainer:
    return build_trainer(lock, folder, *OPTIONS, f"--trainer.work_dir={work}", *more, stop=stop)


def run(lock: Path, folder: str, work: Path, stop: int, *more: str) -> Trainer:
    trainer = build(lock, folder, work, stop, *more)
    trainer.fit()
    return trainer


@pytest.mark.slow
def test_a_run_goes_on_from_s3_on_another_machine_as_if_it_had_never_stopped(
    tiny_mixture: Path, tmp_path: Path, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny_mixture, str(tmp_path / "local"), tmp_path / "local", 6)
    run(tiny_mixture, bucket, tmp_path / "here", 3)
    assert candidates(bucket) == ["step00000003"]  # 1 and 2 were ephemeral
    assert not list((tmp_path / "here").glob("step*"))  # nothing stays on the way
    background = "--trainer.callbacks.checkpointer.save_async=true"
    run(tiny_mixture, bucket, tmp_path / "there", 6, background)
    assert "resuming from s3://" in capsys.readouterr().err
    assert Store(bucket).read("latest") == b"step00000006\n"
    assert metrics(tmp_path / "there") == metrics(tmp_path / "local")
    one, other = (
        tensors(lambda: build_trainer(tiny_mixture, tmp_path / "none"), folder)  # type: ignore[arg-type]
        for folder in (f"{bucket}/step00000006", tmp_path / "local" / "step00000006")
    )
    assert same_bits(one, other)

    # A machine whose own lines go less far takes those of the store.
    run(tiny_mixture, bucket, tmp_path / "here", 7)
    assert metrics(tmp_path / "here")[:6] == metrics(tmp_path / "local")

    result = CliRunner().invoke(export, [bucket, "--output", f"{bucket}/exported"])
    assert result.exit_code == 0, result.output
    assert Store(bucket).exists("exported/model.safetensors")


def cut(store: Store) -> None:
    name = next(e.name for e in store.entries() if e.name.endswith("/rank00000.safetensors"))
    store.put(name, store.read(name)[:-1])


def forget(store: Store) -> None:
    store.delete(MANIFEST)


@pytest.mark.parametrize("damage", [cut, forget])
def test_damaged_and_partial_ones_are_passed_over_cleaned_and_written_again(
    tiny_mixture: Path, tmp_path: Path, bucket: str, damage: Callable[[Store], None]
) -> None:
    run(tiny_mixture, bucket, tmp_path, 5, "--trainer.callbacks.checkpointer.remove=never")
    damage(Store(f"{bucket}/step00000005"))
    assert partial_folders(bucket) == (["step00000005"] if damage is forget else [])
    told: list[object] = []
    newest = newest_checkpoint(bucket, World(), told.append)
    assert newest.step == 4
    assert len(told) == 1
    run(tiny_mixture, bucket, tmp_path, 5)
    assert open_checkpoint(f"{bucket}/step00000005", World()).step == 5
    assert partial_folders(bucket) == []


def test_a_store_that_fails_during_a_save_costs_tries_or_a_warning_but_never_the_run(
    tiny_mixture: Path, tmp_path: Path, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = f"s3://{proxy.server['bucket']}/{tmp_path.name}"
    proxy.inject(reset, answer(503, "SlowDown"), method="PUT", key="step00000001")  # passing
    proxy.inject(answer(503, "SlowDown"), method="PUT", key="step00000002", times=None)  # lasting
    there: list[list[str]] = []

    class Look(Callback):
        def post_step(self) -> None:
            there.append(candidates(bucket))

    trainer = build(tiny_mixture, bucket, tmp_path, 4)
    trainer.callbacks["look"] = look = Look()
    look.trainer = trainer
    trainer.fit()
    said = capsys.readouterr().err
    assert said.count("training goes on; the next save is the next try") == 1
    assert "warning: remote storage refused 10 times: 503 SlowDown" in said
    # The last good one stays until the next is there.
    there.append(candidates(bucket))  # a step is saved after every callback's post_step
    assert there == [[], *([f"step{step:08d}"] for step in (1, 1, 3, 4))]
    assert partial_folders(bucket) == []


def test_other_kinds_of_storage_and_a_remote_work_dir_are_refused(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="not supported"):
        build_trainer(tiny_mixture, tmp_path, "--trainer.save_folder=weka://bucket/run")
    with pytest.raises(UsageError, match="work_dir"):
        build_trainer(tiny_mixture, tmp_path, "--trainer.work_dir=s3://bucket/run")
