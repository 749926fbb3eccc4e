"""Row 52: a signal to any rank stops all ranks at one step, saved; a second one ends at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import rank_server, run_ranks
from support.runs import build_trainer, group_world, metrics, run_until, write_config

from olm_data.errors import UsageError
from olm_train.callbacks.base import Callback
from olm_train.checkpoint import manager
from olm_train.checkpoint.load import open_checkpoint
from olm_train.distributed.preempt import SLURM_END, Preempted, Preemption, seconds_left
from olm_train.distributed.world import World


class SignalAt(Callback):
    """Sends this process a signal in the middle of a step, on one rank."""

    def __init__(self, step: int, number: signal.Signals, rank: int = 0) -> None:
        self.step, self.number, self.rank = step, number, rank

    def pre_optim_step(self) -> None:
        if self.trainer.step + 1 == self.step and self.trainer.world.rank == self.rank:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_52_signal_leaves_a_checkpoint_and_the_requeue_code(
    tiny_mixture: Path, tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path, callbacks={"signal": SignalAt(4, number)})
    handler = signal.getsignal(number)
    with pytest.raises(Preempted) as stop:
        trainer.fit()
    assert stop.value.exit_code == exit_code
    assert stop.value.request.code == number
    assert open_checkpoint(tmp_path / f"step{stop.value.step:08d}", World()).step in (4, 5)
    assert signal.getsignal(number) == handler  # the process is as it was


def stop_by_rank_one(lock: Path, folder: Path) -> tuple[int, int]:
    callbacks = {"signal": SignalAt(4, signal.SIGTERM, rank=1)}
    trainer = build_trainer(lock, folder, callbacks=callbacks, world=group_world())
    with pytest.raises(Preempted) as stop:
        trainer.fit()
    return stop.value.step, stop.value.request.code


def test_52_ranks_agree_on_the_step_when_one_of_them_is_signalled(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    one, two = run_ranks(stop_by_rank_one, 2, tiny_mixture, tmp_path)
    assert one == two == (4, signal.SIGTERM)
    assert open_checkpoint(tmp_path / "step00000004", World()).step == 4


def test_52_signal_during_evaluation_stops_it_and_it_is_made_once_after_the_restart(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path)
    evaluate = trainer.train_module.eval_losses

    def interrupted(batch: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer.train_module, "eval_losses", interrupted)
    with pytest.raises(Preempted) as stop:
        trainer.fit()
    assert stop.value.step == 9  # the first evaluation
    assert not [line for line in metrics(tmp_path) if "eval" in line]
    build_trainer(tiny_mixture, tmp_path).fit()
    assert [line["step"] for line in metrics(tmp_path) if "eval" in line] == [9, 18, 24]


@pytest.mark.parametrize("background", [False, True])
def test_52_signal_inside_a_save_lets_it_finish_and_stops_the_run_after_it(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    save = manager.save_checkpoint

    def interrupted(*arguments: Any, **options: Any) -> str:
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGTERM)
        return save(*arguments, **options)

    monkeypatch.setattr(manager, "save_checkpoint", interrupted)
    option = f"--trainer.callbacks.checkpointer.save_async={str(background).lower()}"
    trainer = build_trainer(tiny_mixture, tmp_path, option)
    with pytest.raises(Preempted) as stop:
        trainer.fit()
    assert stop.value.step >= 6 if background else stop.value.step == 6
    for step in {6, stop.value.step}:
        assert open_checkpoint(tmp_path / f"step{step:08d}", World()).step == step


def test_52_signal_while_the_blocks_are_compiled_stops_the_run_after_that_step(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import compile_fx  # a second of its own

    compiled: list[Any] = []

    def interrupted(graph: Any, inputs: object, **options: object) -> Any:
        compiled.append(graph)
        if len(compiled) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx", interrupted)
    torch.compiler.reset()
    trainer = build_trainer(tiny_mixture, tmp_path, "--train_module.compile_model=true")
    with pytest.raises(Preempted) as stop:
        trainer.fit()
    torch.compiler.reset()
    assert compiled
    assert stop.value.step == 1
    assert open_checkpoint(tmp_path / "step00000001", World()).step == 1


def test_52_signal_in_the_last_step_changes_nothing(tiny_mixture: Path, tmp_path: Path) -> None:
    build_trainer(tiny_mixture, tmp_path, callbacks={"signal": SignalAt(24, signal.SIGTERM)}).fit()
    assert [line["step"] for line in metrics(tmp_path) if "eval" in line] == [9, 18, 24]
    assert open_checkpoint(tmp_path / "step00000024", World()).step == 24


def signal_twice(second: signal.Signals) -> None:
    with Preemption(debounce=-1):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), second)
    raise AssertionError("still here")


@pytest.mark.slow
@pytest.mark.parametrize(("second", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_52_second_signal_ends_at_once(second: signal.Signals, code: int) -> None:
    with rank_server() as context:
        process = context.Process(target=signal_twice, args=(second,))
        process.start()
    process.join()
    assert process.exitcode == code


def test_52_one_request_that_arrives_twice_counts_once() -> None:
    with Preemption(debounce=3600) as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        request = preemption.ask()
    assert request is not None
    assert (request.code, request.by) == (signal.SIGTERM, "SIGTERM")


class StalledData(Callback):
    """From a step on, one rank's data never comes; then this process gets a signal."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def post_step(self) -> None:
        trainer = self.trainer
        if (trainer.step, trainer.world.rank) == (self.step, self.rank):
            trainer.data_loader.ready = self.never  # type: ignore[method-assign]

    def never(self, seconds: float) -> bool:
        os.kill(os.getpid(), signal.SIGUSR1)
        return False


def stop_while_waiting(lock: Path, folder: Path) -> tuple[int, int, list[int]]:
    callbacks = {"stalled": StalledData(5, rank=1)}
    world = group_world()
    trainer = build_trainer(lock, folder, callbacks=callbacks, world=world)
    with pytest.raises(Preempted) as stop:
        trainer.fit()
    limit = "--trainer.time_limit=0.001"
    trainer = build_trainer(lock, folder, limit, world=world)
    with pytest.raises(Preempted) as end:
        trainer.fit()
    return stop.value.step, stop.value.request.code, [end.value.step, end.value.exit_code]


@pytest.mark.slow
def test_52_a_rank_that_waits_for_data_stops_all_of_them_and_so_does_the_time_limit(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    one, two = run_ranks(stop_while_waiting, 2, tiny_mixture, tmp_path)
    assert one == two == (5, signal.SIGUSR1, [5, 75])
    assert open_checkpoint(tmp_path / "step00000005", World()).step == 5


def test_52_slurms_own_limit_is_read_and_its_absence_refused() -> None:
    assert seconds_left(7.5, {}) == 7.5
    assert seconds_left("slurm", {SLURM_END: "100"}) < 0
    with pytest.raises(UsageError, match=SLURM_END):
        seconds_left("slurm", {})


@pytest.mark.slow
def test_52_a_signal_before_the_first_step_ends_the_command_with_the_requeue_code(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")
    code, told = run_until("training ", signal.SIGTERM, config)
    assert code == 75
    assert "stopped by SIGTERM" in told
