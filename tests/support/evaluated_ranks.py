"""Ranks of a run that is evaluated, of which one gets a signal in the middle of an evaluation.

    python evaluated_ranks.py LOCK FOLDER TASK KIND      rank 1 is killed (SIGKILL) at step 2

KIND: `task` or `held`, in whose second batch the signal comes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from support.runs import build_trainer, group_world

from olm_train.distributed.preempt import Preempted
from olm_train.distributed.world import World

PROMPTS = ["the quick", "def f", "", "seven owls sleep", "a"]
STEP, BATCH, RANK = 2, 2, 1


def evaluated(lock: str, folder: str, task: str, kind: str = "", number: int = 0) -> list[Any]:
    """Train four steps with FSDP, evaluated at each second one; return how it ended."""
    world = group_world()
    return fit(lock, folder, task, kind, number, world)


def fit(lock: str, folder: str, task: str, kind: str, number: int, world: World) -> list[Any]:
    """See `evaluated`; `world` is the ranks."""
    callbacks = "--trainer.callbacks"
    trainer = build_trainer(
        Path(lock),
        Path(folder),
        "--trainer.hard_stop={value: 4, unit: steps}",
        "--train_module.dp_config={name: fsdp, param_dtype: float32}",
        "--train_module.rank_microbatch_size=64",
        f"{callbacks}.checkpointer={{save_interval: 1}}",
        f"{callbacks}.lm_evaluator.eval_interval=2",
        f"{callbacks}.downstream_evaluator={{tasks: {{mine: {task}}}, eval_interval: 2}}",
        f"{callbacks}.samples={{prompts: {PROMPTS}, max_new_tokens: 5, eval_interval: 2}}",
        world=world,
    )
    evaluate, seen = trainer.train_module.eval_losses, 0

    def interrupted(batch: Any, **options: Any) -> Any:
        nonlocal seen
        here = "task" if options.get("fp32_logits") else "held"
        if (trainer.step, here, world.rank) == (STEP, kind, RANK):
            seen += 1
            if seen == BATCH:
                os.kill(os.getpid(), number)
        return evaluate(batch, **options)

    trainer.train_module.eval_losses = interrupted  # type: ignore[method-assign]
    try:
        trainer.fit()
    except Preempted as stop:
        return ["stopped", stop.step, stop.exit_code]
    return ["done", trainer.step, seen]


def texts(lock: str, folder: str, temperature: float) -> None:
    """Train a step with sharded weights and write texts after it."""
    samples = f"{{prompts: {PROMPTS}, max_new_tokens: 9, temperature: {temperature}}}"
    dp = ["--train_module.dp_config={name: fsdp, param_dtype: float32}"]
    dp += ["--train_module.rank_microbatch_size=64"]
    build_trainer(
        Path(lock),
        Path(folder),
        "--trainer.hard_stop={value: 1, unit: steps}",
        "--trainer.callbacks.lm_evaluator=null",
        f"--trainer.callbacks.samples={samples}",
        *dp,
        world=group_world(),
    ).fit()


if __name__ == "__main__":
    fit(*sys.argv[1:], signal.SIGKILL, World.start())  # type: ignore[call-arg,arg-type]
