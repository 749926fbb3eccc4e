"""Saves: when, what they hold, beside the training and on S3, and how long they stay."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.polling import wait_until
from support.runs import SIX_STEPS, build_trainer, metrics, same_bits, tensors
from support.store_proxy import Proxy, answer, reset

import olm_train.checkpoint.manager
from olm_data.errors import ResourceError, UsageError, ValidationError
from olm_data.storage.store import Store
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.load import newest_checkpoint, open_checkpoint
from olm_train.checkpoint.manifest import MANIFEST, Kind, candidates, partial_folders
from olm_train.checkpoint.policy import CheckpointerConfig, Removal, removable
from olm_train.distributed.world import World
from olm_train.extensions.hf_export.command import main as export
from olm_train.trainer import Trainer

SAVE = "{save_interval: 3, fixed_steps: [4], pre_train_checkpoint: true, save_async: %s}"


class At(Callback):
    """Does something after a step."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step, self.action = step, action

    def post_step(self) -> None:
        if self.trainer.step == self.step:
            self.action()


def train(lock: Path, folder: Path, background: str, *callbacks: Callback, more: str = "") -> Any:
    trainer = build_trainer(
        lock,
        folder,
        f"--trainer.callbacks.checkpointer={SAVE % background}",
        *filter(None, [more]),
        quiet=True,
        stop=6,
        callbacks={f"at {n}": callback for n, callback in enumerate(callbacks)},
    )
    trainer.fit()
    return trainer


class Gate:
    """Stands before every save but that of step 0; keeps a diary."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.diary = threading.Event(), list[str]()
        real = olm_train.checkpoint.manager.save_checkpoint

        def gated(folder: Any, contents: Any, *arguments: Any, **options: Any) -> str:
            self.diary.append(f"begin {contents.step}")
            if contents.step:
                assert self.open.wait(600)
            done = real(folder, contents, *arguments, **options)
            self.diary.append(f"end {contents.step}")
            return done

        monkeypatch.setattr(olm_train.checkpoint.manager, "save_checkpoint", gated)


def test_later_steps_change_nothing_in_what_is_saved_and_saves_do_not_overlap(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(tiny_mixture, tmp_path / "plain", "false")
    gate = Gate(monkeypatch)

    def seen() -> None:
        # Step 3 is not written yet and its weights have changed since; only now it may go on.
        wait_until(lambda: gate.diary[-1] == "begin 3", "the save of step 3")
        assert not (tmp_path / "run" / "step00000003").exists()
        gate.open.set()

    fixed = "--trainer.callbacks.checkpointer.fixed_steps=[5]"
    beside = train(tiny_mixture, tmp_path / "run", "true", At(4, seen), more=fixed)
    assert gate.diary == [f"{what} {step}" for step in (0, 3, 5, 6) for what in ("begin", "end")]
    assert plain.checkpoints.saved.keys() == {0, 3, 4, 6}
    assert beside.checkpoints.saved.keys() == {0, 3, 5, 6}
    for step in ("step00000000", "step00000003", "step00000006"):
        one, other = (
            tensors(lambda: build_trainer(tiny_mixture, tmp_path / "none"), tmp_path / run / step)
            for run in ("plain", "run")
        )
        assert same_bits(one, other)
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "run")


def test_a_save_that_takes_too_long_ends_the_run(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    timeout = "--trainer.callbacks.checkpointer.save_timeout=0.5"
    # Only step 3 stands at the gate: the save before it may take as long as the disk does.
    free = At(2, lambda: wait_until(lambda: "end 0" in gate.diary, "the save of step 0"))
    with pytest.raises(ResourceError, match=r"step 3 is not written after 0\.5 seconds"):
        train(tiny_mixture, tmp_path, "true", free, more=timeout)
    gate.open.set()


def test_an_error_of_the_run_waits_for_the_save(tiny_mixture: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        train(tiny_mixture, tmp_path, "true", At(5, fail))
    assert (tmp_path / "latest").read_text() == "step00000004\n"
    assert (tmp_path / "step00000004" / "manifest.json").exists()


def test_a_run_whose_newest_checkpoint_is_gone_says_so_and_never_begins_anew(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_trainer(tiny_mixture, tmp_path, *SIX_STEPS).fit()
    log = (tmp_path / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "step00000006")
    gone = "the checkpoint step00000006 that `latest` names is gone"
    trainer = build_trainer(tiny_mixture, tmp_path, *SIX_STEPS)
    trainer.restore()
    assert trainer.step == 4
    assert f"warning: {gone}" in capsys.readouterr().err
    for folder in tmp_path.glob("step*"):
        shutil.rmtree(folder)
    with pytest.raises(ValidationError, match=f"(?s)no usable checkpoint.*{gone}"):
        build_trainer(tiny_mixture, tmp_path, *SIX_STEPS).fit()
    assert (tmp_path / "metrics.jsonl").read_bytes() == log
    (tmp_path / "latest").unlink()
    trainer = build_trainer(tiny_mixture, tmp_path, *SIX_STEPS)
    trainer.restore()
    assert trainer.step == 0


def left_by(lock: Path, folder: Path, stop: int, options: str) -> list[int]:
    build_trainer(
        lock, folder, f"--trainer.callbacks.checkpointer={options}", stop=stop, quiet=True
    ).fit()
    found = [open_checkpoint(folder / name, World()).step for name in candidates(folder)]
    assert (folder / "latest").read_text().strip() == f"step{found[0]:08d}"
    return found[::-1]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ("{save_interval: 3}", [3, 6, 7]),
        ("{save_interval: 7}", [7]),
        ("{save_interval: 5, ephemeral_save_interval: 1}", [5, 7]),
        ("{save_interval: 5, ephemeral_save_interval: 2, remove: never}", [2, 4, 5, 6, 7]),
        # a list of steps stands in place of the interval
        ("{save_steps: [2, 5]}", [2, 5, 7]),
        ("{save_steps: [2, 4, 5], max_checkpoints: 2}", [4, 5, 7]),
        ("{save_steps: [2, 4], fixed_steps: [3], remove: all_non_permanent}", [2, 3, 4, 7]),
        ("{save_steps: [2], save_interval: 5}", [2, 5, 7]),
        ("{save_interval: 2, max_checkpoints: 2, fixed_steps: [3]}", [3, 4, 6, 7]),
    ],
)
def test_what_is_left_after_seven_steps(
    tiny_mixture: Path, tmp_path: Path, options: str, left: list[int]
) -> None:
    assert left_by(tiny_mixture, tmp_path, 7, options) == left


def test_ephemeral_ones_of_an_earlier_run_go_with_the_next_save(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    keep = "{save_interval: 5, ephemeral_save_interval: 1, remove: never}"
    assert left_by(tiny_mixture, tmp_path, 4, keep) == [1, 2, 3, 4]
    rule = "{save_interval: 5, remove: ephemeral_only}"
    assert left_by(tiny_mixture, tmp_path, 6, rule) == [4, 5, 6]  # 4 ended a run
    rule = "{save_interval: 5, remove: all_non_permanent}"
    assert left_by(tiny_mixture, tmp_path, 8, rule) == [5, 8]


@pytest.mark.parametrize(
    "options",
    [
        {"save_interval": 0},
        {"save_interval": 5, "ephemeral_save_interval": 5},
        {"ephemeral_save_interval": 0},
        {"ephemeral_cooldown": 3},
        {"max_checkpoints": 2, "remove": Removal.never},
        *({"save_steps": steps} for steps in ([4, 2], [2, 2], [0])),
    ],
)
def test_steps_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CheckpointerConfig(**options)


def test_after_a_step_of_the_list_ephemeral_checkpoints_cool_down() -> None:
    rule = CheckpointerConfig(save_steps=[4], ephemeral_save_interval=1, ephemeral_cooldown=2)
    kinds = [rule.kind_at(step, 9) for step in range(3, 9)]
    often = Kind.ephemeral
    assert kinds == [often, Kind.permanent, None, None, often, often]
    assert rule.interval is None


known = st.dictionaries(st.integers(0, 99), st.sampled_from(Kind), min_size=1)


@given(known, st.sampled_from(Removal), st.data())
def test_the_newest_good_one_newer_ones_and_permanent_ones_stay(
    kinds: dict[int, Kind], rule: Removal, data: st.DataObject
) -> None:
    newest = data.draw(st.sampled_from(sorted(kinds)))
    gone = removable(kinds, newest, rule)
    assert gone == sorted(set(gone))
    for step in gone:
        assert step < newest
        assert kinds[step] is not Kind.permanent


def test_each_rule_removes_what_it_says() -> None:
    kinds = {1: Kind.permanent, 2: Kind.ephemeral, 3: Kind.final, 4: Kind.ephemeral}
    assert removable(kinds, 4, Removal.ephemeral_only) == [2]
    assert removable(kinds, 4, Removal.all_non_permanent) == [2, 3]
    assert removable(kinds, 4, Removal.never) == []


def test_an_ephemeral_checkpoint_waits_after_one_that_stays() -> None:
    def steps(**options: int | None) -> list[int]:
        config = CheckpointerConfig(
            save_interval=10,
            ephemeral_save_interval=2,
            fixed_steps=[5],
            **options,  # type: ignore[arg-type]
        )
        return [n for n in range(1, 20) if config.kind_at(n, 100) is Kind.ephemeral]

    assert steps() == [2, 4, 6, 8, 12, 14, 16, 18]
    assert steps(ephemeral_cooldown=1) == [2, 4, 8, 12, 14, 16, 18]
    assert steps(ephemeral_cooldown=3) == [2, 4, 14, 16, 18]


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
