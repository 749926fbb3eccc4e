"""What happens around the steps of a run of several ranks changes no bit of the steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.distributed import run_ranks
from support.runs import build_trainer, group_world, same_bits, steps_of, tensors

STRATEGIES = {
    "ddp": "{name: ddp}",
    "fsdp, kept whole": "{name: fsdp, reshard_after_forward: false}",
    "hsdp": "{name: hsdp, num_replicas: 1}",
}
BUSY = (
    "--trainer.callbacks.lm_evaluator.eval_interval=2",
    "--trainer.callbacks.lm_evaluator.eval_on_startup=true",
    "--trainer.callbacks.checkpointer={save_interval: 1, pre_train_checkpoint: true, "
    "save_async: true}",
    "--trainer.callbacks.replica_checker={interval: 1}",
    "--trainer.callbacks.replay_checker={steps: 2}",
)
QUIET = (
    "--trainer.callbacks.lm_evaluator=null",
    "--trainer.callbacks.checkpointer={save_interval: 100}",
)


def _fit(lock: Path, folder: Path, *options: str) -> None:
    build_trainer(lock, folder, *options, world=group_world()).fit()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluations_checkpoints_checks_and_resumes_change_no_bit_of_the_steps(
    strategy: str, tiny_mixture: Path, tmp_path: Path
) -> None:
    sharing = f"--train_module.dp_config={STRATEGIES[strategy]}"
    end = "--trainer.max_duration={value: 6, unit: steps}"
    for name, options, stops in (("quiet", QUIET, (6,)), ("busy", BUSY, (3, 6))):
        for stop in stops:
            stop_at = f"--trainer.hard_stop={{value: {stop}, unit: steps}}"
            run_ranks(_fit, 2, tiny_mixture, tmp_path / name, sharing, end, stop_at, *options)
    quiet, busy = (steps_of(tmp_path / name) for name in ("quiet", "busy"))
    assert len(quiet) == 6
    assert quiet == busy
    ends = [
        tensors(
            lambda: build_trainer(tiny_mixture, tmp_path / "none"), tmp_path / name / "step00000006"
        )
        for name in ("quiet", "busy")
    ]
    assert same_bits(*ends)
