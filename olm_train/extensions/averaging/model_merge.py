"""Averages the weights of the last steps before a merge step, and saves the mean as a checkpoint.

    post_step in a window -> mean += (weights - mean) * fraction     on the device, sharded
    evaluate at its end   -> step00000500-merged/, evaluated as `merged/NAME`

Each open window is two fp32 tensors a weight, in the checkpoints of the run too: a run that is
killed in a window and goes on, also on another number of ranks, ends with the same mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import msgspec
from torch import Tensor

from olm_data.bounded_json import JsonObject
from olm_data.config.hints import PositiveInt
from olm_data.decoding import convert
from olm_train.checkpoint.merged import Merge
from olm_train.extensions.averaging.averaged_weights import AveragingCallback, Suffix, weights_of
from olm_train.optim.averaging import RunningMean, Weighting, fraction


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
        self._means: dict[int, RunningMean] = {}

    def explicit_steps(self) -> dict[str, list[int]]:
        interval = [] if self.merge_interval is None else [self.merge_interval]
        return {"merge_step": self.merge_step, "merge_interval": interval}

    def state_dict(self) -> JsonObject:
        return {"windows": {str(end): msgspec.to_builtins(w) for end, w in self._windows.items()}}

    def load_state_dict(self, state: JsonObject) -> None:
        windows = convert(state["windows"], dict[str, Window])
        self._windows = {int(end): window for end, window in windows.items()}
        self._means = {}

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"{end}.{name}": tensor
            for end in self._windows
            for name, tensor in self._mean(end).tensors.items()
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
            self._mean(end).update(weights, fraction(self.weights, window.count))

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

    def _mean(self, end: int) -> RunningMean:
        if end not in self._means:
            self._means[end] = self.new_mean()
        return self._means[end]

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
            if self.save(self._mean(end), merge, raise_on_error=raise_on_error):
                self._drop(end)
            elif self._failed:
                return

    def _drop(self, end: int) -> None:
        del self._windows[end]
        self._means.pop(end, None)
