"""What callbacks that average weights share: write the mean as a checkpoint, and evaluate it.

mean -> save_folder/step00000100-merged/
mean -> in the model's place -> evaluators -> `merged/NAME` in the log -> the weights again
                                    `-> a signal in the middle: nothing is logged, it is made again
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from olm_data.errors import ResourceError, StorageError, UsageError, printable
from olm_data.run_log.metric_names import of_averaged
from olm_train.callbacks.base import Callback, TrainingRun
from olm_train.callbacks.evaluations import Evaluations, evaluated
from olm_train.checkpoint.merged import Merge
from olm_train.checkpoint.state import flatten
from olm_train.optim.averaging import RunningMean, is_averaged, local
from olm_train.train_module_base import TrainModule

DEFAULT_SUFFIX = "merged"
Suffix = Annotated[
    str, Meta(pattern="^[a-z][a-z0-9_]*$", description="a letter, then letters, digits or _")
]


def refuse_same_name(callback: Callback) -> None:
    """Refuse another callback whose means would have the names of this one's.

    Raises:
        UsageError: names both.
    """
    callbacks = callback.trainer.callbacks
    suffix = getattr(callback, "output_suffix", None)
    same = [n for n, each in callbacks.items() if getattr(each, "output_suffix", None) == suffix]
    if len(same) > 1:
        raise UsageError(
            f"the callbacks {' and '.join(map(printable, same))} both save weights as "
            f"step...-{suffix}",
            where=f"trainer.callbacks.{printable(same[-1])}.output_suffix",
            why="one checkpoint cannot hold both means",
            fix="give one of them another output_suffix",
        )


def weights_of(module: TrainModule) -> dict[str, Tensor]:
    """Return the weights that have a mean, by name: the live tensors, whole or DTensors."""
    state = flatten(module.state_dict()["model"])
    return {name: value for name, value in state.items() if is_averaged(value)}


@contextlib.contextmanager
@torch.no_grad()
def in_place_of_weights(module: TrainModule, mean: Mapping[str, Tensor]) -> Iterator[None]:
    """Put other weights into the model, and its own ones back afterwards, to the bit."""
    weights = weights_of(module)
    kept = {name: local(weights[name]).clone() for name in mean}
    for name, value in mean.items():
        local(weights[name]).copy_(local(value))
    try:
        yield
    finally:
        weights = weights_of(module)  # after an evaluation it cuts weights again
        for name, value in kept.items():
            local(weights[name]).copy_(value)


def write(
    trainer: TrainingRun,
    mean: RunningMean,
    merge: Merge,
    suffix: str,
    *,
    must: bool,
    otherwise: str = "the merge is tried again",
) -> bool:
    """Write a mean as `step...-SUFFIX`; return whether it is there. Every rank calls it.

    The metrics of the steps in it are read first: what a bad step left is no mean of the run.

    Args:
        must: raise the error of a save that fails; else it is said.
        otherwise: what comes of the mean then, for the user.

    Raises:
        ResourceError, StorageError: it cannot be written, if `must`.
        ConflictError: another merge is there, or the lease is lost.
        NonFiniteError: a step of it was bad, and the policy is not to go on.
    """
    trainer.flush_metrics()
    dtypes = {name: weight.dtype for name, weight in weights_of(trainer.train_module).items()}
    whole = flatten(trainer.train_module.state_dict()["model"])
    weights = {**whole, **{n: value.to(dtypes[n]) for n, value in mean.mean.items()}}
    try:
        with trainer.pause():
            folder = trainer.checkpoints.save_merged(weights, merge, suffix)
    except (ResourceError, StorageError) as error:
        if must:
            raise
        trainer.say(f"warning: {error}\n  training goes on; {otherwise}")
        return False
    steps = f"{merge.count:,} steps, {merge.first:,} to {merge.last:,}"
    trainer.say(f"saved the mean of {steps}: {folder.rpartition('/')[2]}")
    return True


def evaluate(trainer: TrainingRun, mean: RunningMean, suffix: str, *, must: bool) -> bool:
    """Let the evaluators look at a mean, and log what they find; every rank calls it.

    Args:
        must: whatever signal comes.

    Returns:
        Whether they did; not where a signal came: then it is made again, after the restart or in
        `post_train`.
    """
    results = dict[str, Mapping[str, float]]()
    with trainer.pause(), in_place_of_weights(trainer.train_module, mean.mean):
        for callback in trainer.callbacks.values():
            found = callback.evaluate_now(to_the_end=must)
            if found is None:
                return False
            results |= {of_averaged(name, suffix): values for name, values in found.items()}
    if results:
        trainer.log_evaluation(results)
    return True


def is_evaluated(trainer: TrainingRun, suffix: str) -> bool:
    """Whether a mean of this step is in the log already, and so was saved; every rank calls it.

    The last checkpoint of a run may be older than that.
    """
    evaluators = [each for each in trainer.callbacks.values() if isinstance(each, Evaluations)]
    names = {of_averaged(name, suffix) for each in evaluators for name in each.folders()}
    known = trainer.world.on_main(lambda: evaluated(trainer.work_dir, trainer.step))
    return bool(names) and names <= known
