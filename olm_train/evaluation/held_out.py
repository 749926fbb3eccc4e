"""Loss, perplexity and bits per byte of a model on a data set, exact over ranks and batches.

    dataset -> EvalLoader: batches of rows, as many on each rank -> losses of labels (the model)
        -> sums by segment, on the device -> LabelGroups: nats, labels, bytes of each group
        -> added over the ranks once -> CE loss, PPL, BPB, tokens

A run's `lm_evaluator` and `olm-train evaluate` both measure here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.tokenizer import TokenizerRules
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.rows.label_groups import LabelGroups, Segments
from olm_data.run_log.metric_names import (
    EVAL_BPB,
    EVAL_CE_LOSS,
    EVAL_PERPLEXITY,
    EVAL_TOKENS,
    group_of,
    of_group,
)
from olm_train.data.batch import Batch
from olm_train.data.loader import EvalLoader
from olm_train.distributed.world import World
from olm_train.model.loss import sum_by_piece

ByLabel = Callable[[Batch], Tensor | None]
"""Batch -> fp32 [b, S], nats of each label, 0 where ignored; None: only their sum is known."""
InSum = Callable[[Batch], tuple[Tensor, Tensor]]
"""Batch -> nats of all its labels, and how many they are."""


class HeldOut:
    """A data set to measure a model on, as often as wanted.

    Args:
        dataset: of the model's tokenizer, see `open_held_out`.
        sequence_length: tokens of a row.
        microbatch: tokens of a batch of a rank.
        by: what the labels are grouped by, see `LabelGroups`.
        world: the ranks that share the rows; None: this process alone.

    Raises:
        UsageError: a column is not there, or the sizes do not fit each other.
        ValidationError: the data set is damaged.
    """

    def __init__(
        self,
        dataset: Dataset,
        sequence_length: int,
        microbatch: int,
        *,
        by: Sequence[str] = (),
        world: World | None = None,
    ) -> None:
        self.dataset, self._world = dataset, world or World()
        self._loader = EvalLoader(
            dataset,
            sequence_length,
            microbatch,
            rank=self._world.rank,
            world_size=self._world.size,
        )
        self._groups, self._by = LabelGroups(dataset, sequence_length, by), tuple(by)

    def measure(
        self,
        by_label: ByLabel,
        in_sum: InSum | None = None,
        *,
        stop: Callable[[], bool] | None = None,
        max_batches: int | None = None,
    ) -> dict[str, float] | None:
        """Return the metrics of a model on the data set; every rank calls it, and takes all of it.

        Args:
            by_label: the model.
            in_sum: asked instead where `by_label` returns None.
            stop: asked before each batch, the same answer on every rank: leave off.
            max_batches: at most so many batches on each rank.

        Returns:
            By the names of `metric_names`, of each group too; None where it was left off.

        Raises:
            UsageError: groups are wanted, and the losses of labels are not known.
        """
        device = self._world.device
        found: list[tuple[Segments, Tensor]] = []
        whole = torch.zeros(2, dtype=torch.float64, device=device)
        try:
            for number, batch in enumerate(self._loader):
                if stop is not None and stop():
                    return None
                if number == max_batches:
                    break
                losses = by_label(batch)
                if losses is None:
                    whole += self._in_sum(in_sum, batch)
                    continue
                rows, length = batch.labels.shape
                segments = self._groups.segments(int(batch.rows[0]), rows)
                assert segments.offsets[-1] == rows * length
                offsets = torch.from_numpy(segments.offsets).to(device, non_blocking=True)
                labels = batch.labels.to(device, non_blocking=True)
                found.append((segments, sum_by_piece(losses.flatten(), labels, offsets)))
        finally:
            self._loader.close()
        return self._results(found, whole)

    def _in_sum(self, in_sum: InSum | None, batch: Batch) -> Tensor:
        if in_sum is None or self._by:
            raise UsageError(
                f"labels cannot be grouped by {', '.join(self._by)}: the train module gives no "
                "losses of labels",
                fix="leave `by` out, or write its method eval_losses",
            )
        nats, labels = in_sum(batch)
        return torch.stack([nats.double(), labels.double()])

    def _results(self, found: list[tuple[Segments, Tensor]], whole: Tensor) -> dict[str, float]:
        sums = self._groups.sums()
        if found:
            values = torch.cat([each for _, each in found], 1).cpu().numpy()
            at = 0
            for segments, _ in found:
                count = len(segments.document)
                self._groups.add(sums, segments, *values[:, at : at + count])
                at += count + 1  # the last one is padding
        added = self._world.sum(torch.cat([torch.from_numpy(sums).flatten().to(whole), whole]))
        values = added.cpu().numpy()
        sums, (nats, labels) = values[:-2].reshape(-1, 3), values[-2:]
        if labels:
            # Bytes are known of a whole data set, not of a part without its labels.
            complete = labels == self._groups.labels
            sums[0] = nats, labels, self._groups.text_bytes if complete else 0
        results: dict[str, float] = {}
        for (way, group), row in zip(self._groups.groups, sums.tolist(), strict=True):
            if not way:
                results |= metrics_of(*row)
            elif row[1]:
                of_all = metrics_of(*row)
                kept = [name for name in of_all if name != EVAL_PERPLEXITY]
                results |= {of_group(name, way, group): of_all[name] for name in kept}
        return results


def metrics_of(nats: float, labels: float, size: float) -> dict[str, float]:
    """Return the metrics of summed losses; without BPB where no bytes of text are known."""
    loss = nats / labels if labels else math.nan
    bits = {EVAL_BPB: nats / math.log(2) / size} if size else {}
    return {EVAL_CE_LOSS: loss, EVAL_PERPLEXITY: perplexity(loss), **bits, EVAL_TOKENS: int(labels)}


def lines_of_groups(results: Mapping[str, float]) -> list[str]:
    """Return a line for each way that labels were grouped by: bits per byte where known, or loss.

    `language: BPB de 1.021, en 0.930`
    """
    metric = EVAL_BPB if EVAL_BPB in results else EVAL_CE_LOSS
    ways: dict[str, list[str]] = {}
    for name, value in results.items():
        found = group_of(name)
        if found is not None and found[0] == metric:
            ways.setdefault(found[1], []).append(f"{found[2]} {value:.3f}")
    return [f"{way}: {metric} {', '.join(groups)}" for way, groups in ways.items()]


def perplexity(loss: float) -> float:
    """Return e^loss, infinity where that is beyond a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def open_held_out(name: str, folder: str, lock: Lock | None) -> Dataset:
    """Open a held-out data set and check that its ids mean what they mean in training.

    Args:
        lock: of the training; None: there is none, and the caller checks.

    Raises:
        InputError: there is no data set in `folder`, or no document in it.
        ValidationError: it was made with another tokenizer than the mixture.
    """
    dataset = Dataset.open(folder)
    if not dataset.documents:
        raise InputError(
            f"the held-out data set {name!r} holds no document",
            where=folder,
            why="there would be no loss to measure",
            fix="hold out more (olm-data tokenize --holdout), or leave it out",
        )
    if lock is not None:
        what = f"the held-out data set {name!r}"
        require_tokenizer(dataset.manifest.tokenizer, lock, what, folder)
    return dataset


def require_tokenizer(theirs: TokenizerRules, lock: Lock, what: str, folder: str) -> None:
    """Refuse data whose ids mean something else than in training.

    Args:
        theirs: tokenizer of the data.
        lock: of the training.
        what, folder: the data and their place, for the message.

    Raises:
        ValidationError: they were made with another tokenizer than the mixture.
    """
    if field := theirs.difference(lock.tokenizer):
        raise ValidationError(
            f"{what} was made by another tokenizer than the mixture: {field} is "
            f"{getattr(theirs, field)}, not {getattr(lock.tokenizer, field)}",
            where=folder,
            why="what is measured on it would mean nothing",
            fix="make it with the tokenizer of the mixture: olm-data tokenize of text, olm-data "
            "eval-set build of a task",
        )
