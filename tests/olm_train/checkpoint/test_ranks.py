"""Several ranks: saves beside the training resume bit for bit, and load on any ranks and strategy.

Each launch proves several promises: starting processes is what costs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.distributed import run_ranks
from support.runs import build_trainer, group_world, metrics
from support.training import build, digest, full, train

from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.manifest import Kind
from olm_train.checkpoint.save import Contents, save_checkpoint
from olm_train.distributed.world import World


def digests(module: Any) -> list[str]:
    return [digest(part) for part in full(module).values()]


def two_runs(lock: Path, folder: Path) -> tuple[list[str], list[str], list[str]]:
    world = group_world()

    def run(name: str, stop: int) -> list[str]:
        trainer = build_trainer(
            lock,
            folder / name,
            "--trainer.callbacks.lm_evaluator.enabled=false",
            "--trainer.callbacks.checkpointer={save_interval: 2, save_async: true}",
            "--trainer.callbacks.checkpointer.max_checkpoints=1",
            f"--trainer.hard_stop={{value: {stop}, unit: steps}}",
            world=world,
        )
        trainer.fit()
        return digests(trainer.train_module)

    return run("whole", 5), run("stopped", 3), run("stopped", 5)


@pytest.mark.slow
def test_two_ranks_with_accumulation_resume_bit_for_bit_and_one_rank_reads_the_same(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    one, two = run_ranks(two_runs, 2, tiny_mixture, tmp_path)
    assert one == two
    whole, at_3, resumed = one
    assert resumed == whole != at_3
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "stopped")
    assert sorted(p.name for p in (tmp_path / "whole").glob("step*")) == [
        "step00000004", "step00000005",
    ]  # fmt: skip
    alone = build_trainer(tiny_mixture, tmp_path / "none").train_module
    tensors = alone.state_dict()
    open_checkpoint(tmp_path / "whole" / "step00000005", World()).load_tensors(tensors, World())
    assert digests(alone) == whole


STRATEGIES: dict[str, dict[str, Any]] = {"fsdp": {}, "ddp": {}, "hsdp": {"num_replicas": 2}}


def contents(module: Any) -> Contents:
    return Contents(
        step=1, kind=Kind.permanent, state=module.state_dict(), documents={}, lock_digest=""
    )


def every_strategy(folder: Path) -> dict[str, list[str]]:
    world, found = group_world(), {}
    for name, sharing in STRATEGIES.items():
        module = build(name, world=world, sharing=sharing)
        tensors = module.state_dict()
        open_checkpoint(folder / "alone" / "step00000001", world).load_tensors(tensors, world)
        module.load_state_dict(tensors)
        found[name] = digests(module)
        save_checkpoint(folder / name, contents(module), world, work_dir=folder)
    return found


@pytest.mark.slow
def test_one_ranks_checkpoint_loads_on_four_under_each_strategy_and_theirs_on_one(
    tmp_path: Path,
) -> None:
    module = build()
    train(module, [8], steps=[1])
    save_checkpoint(tmp_path / "alone", contents(module), World(), work_dir=tmp_path)
    expected = digests(module)
    for found in run_ranks(every_strategy, 4, tmp_path):
        assert found == dict.fromkeys(STRATEGIES, expected)
    for name in STRATEGIES:
        other = build()
        tensors = other.state_dict()
        saved = open_checkpoint(tmp_path / name / "step00000001", World())
        saved.load_tensors(tensors, World())
        assert digests(other) == expected
