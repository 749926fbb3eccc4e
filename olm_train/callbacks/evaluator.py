"""Cross entropy and perplexity on held-out data sets, exact over ranks and micro-batches.

The sum of the losses and the count of the labels are added over all batches and ranks, then divided
once: the result does not depend on how the rows were spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from olm_data.config.hints import FilePath, PositiveInt
from olm_data.dataset.dataset import Dataset
from olm_data.errors import ValidationError
from olm_data.mixture.lock import Lock
from olm_data.run_log.log import Evaluation, read_metrics
from olm_data.run_log.metric_names import EVAL_CE_LOSS, EVAL_PERPLEXITY, EVAL_TOKENS
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.manifest import Kind
from olm_train.data.loader import EvalLoader


@dataclass(kw_only=True)
class LMEvaluatorCallback(Callback):
    """Held-out data sets and when to look at them.

    Attributes:
        enabled: evaluate, where `lm_evaluator` is given at all.
        datasets: held-out datasets of the mixture's tokenizer: folder of each by the name it gets
            in the logs.
        eval_interval: steps between evaluations.
        eval_on_startup: also before the first step.
        eval_on_finish: also after the last step.
        max_batches: at most this many micro-batches of each data set on each rank; null: all of it.
    """

    enabled: bool = True
    datasets: dict[str, FilePath]
    eval_interval: PositiveInt = 1000
    eval_on_startup: bool = False
    eval_on_finish: bool = True
    max_batches: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._last = -1
        self._made: dict[str, str] = {}  # digest of each data set evaluated after step `_last`
        self._loaders: dict[str, EvalLoader] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last, "made": dict(self._made)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last, self._made = state["last"], dict(state.get("made", {}))

    def left_to_do(self) -> list[str]:
        """Return the data sets that were not there when the run ended."""
        trainer = self.trainer
        left = self._due()
        for name in self.datasets.keys() & self._made.keys():
            folder = self.datasets[name]
            digest = open_held_out(name, folder, trainer.data_loader.lock).digest
            if self._made[name] != digest:
                trainer.say(
                    f"note: the evaluation {name} of step {self._last:,} was made on another data "
                    f"set ({self._made[name][:12]}, here {digest[:12]}) and is not made again; "
                    "give the new one another name"
                )
        return [f"evaluation {name}" for name in left]

    def pre_train(self) -> None:
        trainer, lock = self.trainer, self.trainer.data_loader.lock
        for name, folder in self.datasets.items():
            self._loaders[name] = EvalLoader(
                open_held_out(name, folder, lock),
                lock.sequence_length,
                trainer.data_loader.rank_microbatch_size,
                rank=trainer.world.rank,
                world_size=trainer.world.size,
            )

    def _due(self) -> list[str]:
        """Return the data sets that are to be looked at after this step and have not been."""
        step, ended = self.trainer.step, self.trainer.step >= self.trainer.stop_step
        due = step % self.eval_interval == 0 and step > 0
        due |= self.eval_on_startup and step == 0
        due |= self.eval_on_finish and ended
        made = self._made.keys() if step == self._last else set()
        names = [name for name in self.datasets if due and name not in made]
        if names and (made or ended):  # evaluations of a run that has ended are in its log alone
            folder = self.trainer.work_dir
            known = self.trainer.world.on_main(lambda: evaluated(folder, step))
            names = [name for name in names if name not in known]
        return names

    def evaluate(self) -> None:
        trainer, step = self.trainer, self.trainer.step
        names = self._due()
        if not names:
            return
        with trainer.pause():
            results = self._evaluate(names)
        if results is None and step >= trainer.stop_step:
            # No start comes after the last step that could make it: save first, then finish it.
            trainer.save_checkpoint(Kind.final, wait=True)
            with trainer.pause():
                results = self._evaluate(names, to_the_end=True)
        if results is not None:
            before = self._made if self._last == step else {}
            made = {name: self._loaders[name].dataset.digest for name in names}
            self._last, self._made = step, {**before, **made}
            trainer.log_evaluation(results)

    def _evaluate(
        self, names: Sequence[str], *, to_the_end: bool = False
    ) -> dict[str, dict[str, float]] | None:
        """Return the results, or None when a signal came: then they are made after the restart.

        Args:
            names: of the data sets.
            to_the_end: whatever signal comes.
        """
        results = {}
        module, world = self.trainer.train_module, self.trainer.world
        for name in names:
            total = torch.zeros(2, dtype=torch.float64, device=world.device)
            for number, batch in enumerate(self._loaders[name]):
                if self.trainer.ask_to_stop() and not to_the_end:
                    return None
                if number == self.max_batches:
                    break
                loss_sum, count = module.eval_batch(batch)
                total += torch.stack([loss_sum.double(), count.double()])
            loss_sum, count = world.sum(total).tolist()
            loss = loss_sum / count if count else math.nan
            results[name] = {
                EVAL_CE_LOSS: loss,
                EVAL_PERPLEXITY: perplexity(loss),
                EVAL_TOKENS: int(count),
            }
        return results


def evaluated(folder: Path, step: int) -> set[str]:
    """Return the data sets that the log of a run has results of after `step`."""
    lines = (line for line in read_metrics(folder) if isinstance(line, Evaluation))
    return {name for line in lines if line.step == step for name in line.results}


def open_held_out(name: str, folder: str, lock: Lock) -> Dataset:
    """Open a held-out data set and check that its ids mean what they mean in training.

    Raises:
        InputError: there is no data set in `folder`.
        ValidationError: it was made with another tokenizer than the mixture.
    """
    dataset = Dataset.open(folder)
    theirs, ours = dataset.manifest.tokenizer, lock.tokenizer
    for what in ("sha256", "probe_sha256", "vocab_size"):
        if getattr(theirs, what) != getattr(ours, what):
            raise ValidationError(
                f"the held-out data set {name!r} was made by another tokenizer than the mixture: "
                f"{what} is {getattr(theirs, what)}, not {getattr(ours, what)}",
                where=folder,
                why="its losses would mean nothing",
                fix="tokenise it with the tokenizer of the mixture",
            )
    return dataset


def perplexity(loss: float) -> float:
    """Return e^loss, infinity where that is beyond a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
