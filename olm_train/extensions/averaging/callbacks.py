"""Averages the weights of the last steps before a merge step, and saves the mean as a checkpoint.

    post_step in a window -> mean += (weights - mean) * fraction     on the device, sharded
    evaluate at its end   -> step00000500-merged/, evaluated as `merged/NAME`

Each open window is two fp32 tensors a weight, in the checkpoints of the run too: a run that is
killed in a window and goes on, also on another number of ranks, ends with the same mean.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, cast

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from olm_data.bounded_json import JsonObject
from olm_data.config.hints import NonNegativeInt, PositiveInt
from olm_data.decoding import convert
from olm_data.errors import ResourceError, StorageError, UsageError, printable
from olm_data.run_log.metric_names import of_averaged
from olm_train.callbacks.base import Callback
from olm_train.callbacks.evaluations import Evaluations, evaluated
from olm_train.checkpoint.merged import Merge
from olm_train.checkpoint.state import flatten
from olm_train.extensions.averaging.weighting import RunningMean, Weighting, fraction, is_averaged
from olm_train.model.shards import local_part
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


class Average(msgspec.Struct, kw_only=True):
    """What a resumed run needs: the first step in the average, how many are, and the step of the
    last one that was written; `decay` is that of the steps so far."""

    first: int = 0
    count: int = 0
    written: int = 0
    decay: float = 0.0


@dataclass(kw_only=True)
class EMACallback(AveragingCallback):
    """Saves an exponential moving average of the weights as `stepNNNNNNNN-ema`.

    Attributes:
        enabled: average, where `ema` is given at all.
        decay: what remains of the average at each step; 0.999 looks back over about 1,000 steps.
        start_step: steps before the first one in the average.
        save_interval: steps between averages that are saved and evaluated; null: at the end alone.
        output_suffix: end of the folder's name.
    """

    enabled: bool = True
    decay: Annotated[float, Meta(ge=0, lt=1)] = 0.999
    start_step: NonNegativeInt = 0
    save_interval: PositiveInt | None = None
    output_suffix: Suffix = "ema"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._average = Average(decay=self.decay)
        self._mean: RunningMean | None = None

    def explicit_steps(self) -> dict[str, list[int]]:
        return {"start_step": [self.start_step + 1]}

    def state_dict(self) -> JsonObject:
        return msgspec.to_builtins(self._average)

    def load_state_dict(self, state: JsonObject) -> None:
        self._average = convert(state, Average)
        self._mean = None

    def tensors(self) -> dict[str, Tensor]:
        return self._running().tensors if self._average.count else {}

    def pending(self) -> list[str]:
        return ["average of the weights"] if self._is_due() else []

    def pre_train(self) -> None:
        super().pre_train()
        average, trainer = self._average, self.trainer
        if average.count and average.first + average.count - 1 != trainer.step:
            trainer.say(f"note: the average of the weights begins anew after step {trainer.step:,}")
            self._average, self._mean = Average(decay=self.decay), None
        elif average.count and average.decay != self.decay:
            trainer.say(
                f"note: the average decays by {self.decay:g} from here, not {average.decay}"
            )
        self._average.decay = self.decay

    def post_step(self) -> None:
        average, step = self._average, self.trainer.step
        if step <= self.start_step:
            return
        if not average.count:
            average.first = step
            if step > self.start_step + 1:
                self.trainer.say(f"note: the average of the weights begins with step {step:,}")
        average.count += 1
        part = 1 if average.count == 1 else 1 - self.decay
        self._running().update(weights_of(self.trainer.train_module), part)

    def evaluate(self) -> None:
        if self._is_due() and not self._failed:
            self._write(raise_on_error=False)

    def post_train(self) -> None:
        if self._is_due(ended=True):
            self._write(raise_on_error=True)

    def _is_due(self, *, ended: bool = False) -> bool:
        average, each, trainer = self._average, self.save_interval, self.trainer
        step = trainer.step
        ended |= step >= trainer.stop_step
        due = ended or (each is not None and step % each == 0)
        missing = due and average.count > 0 and average.written != step
        return missing and not (ended and self.is_evaluated())

    def _running(self) -> RunningMean:
        if self._mean is None:
            self._mean = self.new_mean()
        return self._mean

    def _write(self, *, raise_on_error: bool) -> None:
        average, step = self._average, self.trainer.step
        merge = Merge(
            weights="ema",
            first=average.first,
            last=step,
            count=average.count,
            decay=self.decay,
        )
        ended = step >= self.trainer.stop_step
        otherwise = "it is tried again" if ended else f"no average of step {step:,} is saved"
        if self.save(self._running(), merge, raise_on_error=raise_on_error, otherwise=otherwise):
            average.written = step


class Window(msgspec.Struct, kw_only=True):
    """Steps that are averaged: the first one, how many so far, and how they are weighted."""

    first: int
    count: int = 0
    weights: str = "uniform"


@dataclass(kw_only=True)
class ModelMergeCallback(AveragingCallback):
    """Saves the mean of the weights after the last steps as `stepNNNNNNNN-merged`.

    Attributes:
        enabled: average, where `model_merge` is given at all.
        merge_step: steps after which a merge is saved; default, without `merge_interval` too: the
            end of the run.
        merge_interval: also each so many steps; null: not.
        merge_last_n_steps: steps whose weights are averaged. Windows may overlap, and each takes 8
            bytes of memory a parameter, sharded as the weights are.
        weights: `uniform`: all count the same; `linear`: 1, 2, 3, ...; `decay`: as if the learning
            rate had fallen like 1 - sqrt in the window.
        output_suffix: end of the folder's name.
    """

    enabled: bool = True
    merge_step: list[PositiveInt] = field(default_factory=list)
    merge_interval: PositiveInt | None = None
    merge_last_n_steps: PositiveInt = 500
    weights: Weighting = "uniform"
    output_suffix: Suffix = "merged"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._windows: dict[int, Window] = {}  # by the step of the merge
        self._means = defaultdict[int, RunningMean](self.new_mean)

    def explicit_steps(self) -> dict[str, list[int]]:
        interval = [] if self.merge_interval is None else [self.merge_interval]
        return {"merge_step": self.merge_step, "merge_interval": interval}

    def state_dict(self) -> JsonObject:
        return {"windows": {str(end): msgspec.to_builtins(w) for end, w in self._windows.items()}}

    def load_state_dict(self, state: JsonObject) -> None:
        windows = convert(state["windows"], dict[str, Window])
        self._windows = {int(end): window for end, window in windows.items()}
        self._means.clear()

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"{end}.{name}": tensor
            for end in self._windows
            for name, tensor in self._means[end].tensors.items()
        }

    def pending(self) -> list[str]:
        ends = self._complete()
        if ends and self.is_evaluated():
            return []
        return [f"merge of step {end:,}" for end in ends]

    def pre_train(self) -> None:
        super().pre_train()
        trainer, step = self.trainer, self.trainer.step
        for end, window in list(self._windows.items()):
            last = window.first + window.count - 1
            if last != step and (last != end or end > step):
                why = f"it is of the steps {window.first:,} to {last:,}"
            elif window.weights != self.weights:
                why = f"its weights are {window.weights}, and now {self.weights}"
            elif end > step and not self._is_merge(end):
                why = "no merge is wanted there any more"
            else:
                continue
            trainer.say(f"note: the merge of step {end:,} that was begun is dropped: {why}")
            self._drop(end)

    def post_step(self) -> None:
        step = self.trainer.step
        ends = self._open_at(step)
        if not ends:
            return
        weights = weights_of(self.trainer.train_module)
        for end in ends:
            if end not in self._windows:
                self._begin(end)
            window = self._windows[end]
            window.count += 1
            self._means[end].update(weights, fraction(self.weights, window.count))

    def evaluate(self) -> None:
        if not self._failed:
            self._finish(raise_on_error=False)

    def post_train(self) -> None:
        self._finish(raise_on_error=True)
        for end in self._windows:
            self.trainer.say(
                f"note: no merge of step {end:,}: the run ended before; what was averaged lies in "
                "its last checkpoint"
            )

    def _is_merge(self, step: int) -> bool:
        if not self.merge_step and self.merge_interval is None:
            return step == self.trainer.stop_step
        each = self.merge_interval
        return step in self.merge_step or (each is not None and step % each == 0)

    def _open_at(self, step: int) -> list[int]:
        """Return the merges that a step belongs to."""
        # Those after a hard stop, too: a run that goes on has their first steps in its checkpoint.
        last = self.trainer.max_steps
        ends: Iterable[int] = (*self.merge_step, self.trainer.stop_step)
        if self.merge_interval is not None:
            first = -(-step // self.merge_interval) * self.merge_interval
            stop = min(last + 1, step + self.merge_last_n_steps)
            ends = (*ends, *range(first, stop, self.merge_interval))
        return sorted(
            end
            for end in set(ends)
            if step <= end <= min(last, step + self.merge_last_n_steps - 1) and self._is_merge(end)
        )

    def _begin(self, end: int) -> None:
        step, wanted = self.trainer.step, self.merge_last_n_steps
        if end - step + 1 < wanted:
            self.trainer.say(
                f"note: the merge of step {end:,} is of {end - step + 1:,} steps, not {wanted:,}: "
                f"it begins with step {step:,}"
            )
        self._windows[end] = Window(first=step, weights=self.weights)

    def _complete(self) -> list[int]:
        return [end for end, w in self._windows.items() if w.first + w.count - 1 == end]

    def _finish(self, *, raise_on_error: bool) -> None:
        """Write and evaluate what is complete, and let go of it."""
        ends, trainer = self._complete(), self.trainer
        ended = trainer.step in ends and trainer.step >= trainer.stop_step
        if ended and self.is_evaluated():  # by an earlier start
            ends.remove(trainer.step)
            self._drop(trainer.step)
        for end in ends:
            window = self._windows[end]
            merge = Merge(
                weights=cast("Weighting", window.weights),
                first=window.first,
                last=end,
                count=window.count,
            )
            if self.save(self._means[end], merge, raise_on_error=raise_on_error):
                self._drop(end)
            elif self._failed:
                return

    def _drop(self, end: int) -> None:
        del self._windows[end]
        self._means.pop(end, None)
