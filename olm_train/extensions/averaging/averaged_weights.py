"""What callbacks that average weights share: write the mean as a checkpoint, and evaluate it.

mean -> save_folder/step00000100-merged/
mean -> in the model's place -> evaluators -> `merged/NAME` in the log -> the weights again
                                    `-> a signal in the middle: nothing is logged, it is made again
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from olm_data.errors import ResourceError, StorageError, UsageError, printable
from olm_data.run_log.metric_names import of_averaged
from olm_train.callbacks.base import Callback
from olm_train.callbacks.evaluations import Evaluations, evaluated
from olm_train.checkpoint.merged import Merge
from olm_train.checkpoint.state import flatten
from olm_train.model.shards import local_part
from olm_train.optim.averaging import RunningMean, is_averaged
from olm_train.train_module_base import TrainModule

Suffix = Annotated[
    str, Meta(pattern="^[a-z][a-z0-9_]*$", description="a letter, then letters, digits or _")
]


def weights_of(module: TrainModule) -> dict[str, Tensor]:
    """Return the weights that have a mean, by name: the live tensors, whole or DTensors."""
    state = flatten(module.state_dict()["model"])
    return {name: value for name, value in state.items() if is_averaged(value)}


@contextlib.contextmanager
@torch.no_grad()
def in_place_of_weights(module: TrainModule, mean: Mapping[str, Tensor]) -> Iterator[None]:
    """Put other weights into the model, and its own ones back afterwards, to the bit."""
    weights = weights_of(module)
    kept = {name: local_part(weights[name]).clone() for name in mean}
    for name, value in mean.items():
        local_part(weights[name]).copy_(local_part(value))
    try:
        yield
    finally:
        weights = weights_of(module)  # after an evaluation it cuts weights again
        for name, value in kept.items():
            local_part(weights[name]).copy_(value)


class AveragingCallback(Callback):
    """Of callbacks that keep a mean, and save it as `step...-SUFFIX`.

    Attributes:
        output_suffix: end of the folder's name.
    """

    priority: ClassVar[int] = 2
    output_suffix: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self._failed = False  # a save did, and none has gone well since

    def pre_train(self) -> None:
        """Refuse another callback whose means would have the names of this one's."""
        callbacks, suffix = self.trainer.callbacks.items(), self.output_suffix
        same = [n for n, each in callbacks if getattr(each, "output_suffix", None) == suffix]
        if len(same) > 1:
            raise UsageError(
                f"the callbacks {' and '.join(map(printable, same))} both save weights as "
                f"step...-{suffix}",
                where=f"trainer.callbacks.{printable(same[-1])}.output_suffix",
                why="one checkpoint cannot hold both means",
                fix="give one of them another output_suffix",
            )

    def post_checkpoint_saved(self, folder: str) -> None:
        self._failed = False  # the disk takes something again

    def new_mean(self) -> RunningMean:
        """Return a mean of the weights that has seen none yet."""
        return RunningMean(weights_of(self.trainer.train_module))

    def is_evaluated(self) -> bool:
        """Whether a mean of this step is in the log already, and so was saved; all ranks call it.

        The last checkpoint of a run may be older than that.
        """
        trainer = self.trainer
        evaluators = [each for each in trainer.callbacks.values() if isinstance(each, Evaluations)]
        folders = (name for each in evaluators for name in each.folders())
        names = {of_averaged(name, self.output_suffix) for name in folders}
        known = trainer.world.on_main(lambda: evaluated(trainer.work_dir, trainer.step))
        return bool(names) and names <= known

    def save(
        self,
        mean: RunningMean,
        merge: Merge,
        *,
        raise_on_error: bool,
        otherwise: str = "the merge is tried again",
    ) -> bool:
        """Write a mean, let the evaluators look at it, log what they find; every rank calls it.

        The metrics of the steps in it are read first: what a bad step left is no mean of the run.

        Args:
            raise_on_error: of a save that fails, and evaluate whatever signal comes; else the error
                is said.
            otherwise: what comes of the mean then, for the user.

        Returns:
            Whether both were done; after a signal it is evaluated again, after the restart or in
            `post_train`.

        Raises:
            ResourceError, StorageError: it cannot be written, if `must`.
            ConflictError: another merge is there, or the lease is lost.
            NonFiniteError: a step of it was bad, and the policy is not to go on.
        """
        trainer, suffix = self.trainer, self.output_suffix
        trainer.flush_metrics()
        whole = flatten(trainer.train_module.state_dict()["model"])
        means = {n: value.to(whole[n].dtype) for n, value in mean.mean.items()}
        try:
            with trainer.pause():
                folder = trainer.checkpoints.save_merged({**whole, **means}, merge, suffix)
        except (ResourceError, StorageError) as error:
            if raise_on_error:
                raise
            trainer.say(f"warning: {error}\n  training goes on; {otherwise}")
            self._failed = True
            return False
        steps = f"{merge.count:,} steps, {merge.first:,} to {merge.last:,}"
        trainer.say(f"saved the mean of {steps}: {folder.rpartition('/')[2]}")
        results = dict[str, Mapping[str, float]]()
        with trainer.pause(), in_place_of_weights(trainer.train_module, mean.mean):
            for callback in trainer.callbacks.values():
                found = callback.evaluate_now(ignore_stop=raise_on_error)
                if found is None:
                    return False
                results |= {of_averaged(name, suffix): values for name, values in found.items()}
        if results:
            trainer.log_evaluation(results)
        return True
