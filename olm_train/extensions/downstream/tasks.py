"""Log-probabilities of the requests of a task: packed into rows, exact over ranks and batches.

    EvalSet -> `RequestRows`: dozens of requests in one forward pass -> losses of labels (the model)
        -> summed by request on the device -> added over the ranks once -> `scoring.score`

The logits are in fp32. A request sees itself alone, so its score does not depend on what shares its
row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from olm_data.dataset.eval_set import EvalSet
from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_train.distributed.world import World
from olm_train.evaluation.held_out import ByLabel, require_tokenizer
from olm_train.evaluation.scoring import TaskScores, score
from olm_train.extensions.downstream.request_rows import RequestRows
from olm_train.model.loss import sum_by_piece


class TaskRequests:
    """The requests of a task in rows, to be scored as often as wanted.

    Args:
        eval_set: of the model's tokenizer, see `open_task`.
        sequence_length: tokens of a row, the longest request that is scored whole.
        microbatch: tokens of a batch of a rank.
        world: the ranks that share the rows; None: this process alone.
        packed: False gives each request a row of its own; the scores are the same.

    Attributes:
        rows: over all ranks.
        truncated: requests whose context lost its beginning.
    """

    def __init__(
        self,
        eval_set: EvalSet,
        sequence_length: int,
        microbatch: int,
        *,
        world: World | None = None,
        packed: bool = True,
    ) -> None:
        self.eval_set, self._world = eval_set, world or World()
        requests = eval_set.requests
        self._rows = RequestRows(
            requests.tokens,
            requests.ends,
            requests.context,
            sequence_length,
            microbatch,
            world=self._world,
            packed=packed,
        )
        self.rows = self._rows.rows
        self.truncated = int((self._rows.lost > 0).sum())

    def measure(
        self, by_label: ByLabel, *, stop: Callable[[], bool] | None = None
    ) -> TaskScores | None:
        """Return the scores of a model; every rank calls it, and takes all of it.

        Args:
            by_label: the model, with logits in fp32.
            stop: asked before each batch, the same answer on every rank: leave off.

        Returns:
            The scores, the same on every rank; None where it was left off.

        Raises:
            UsageError: the losses of labels are not known.
        """
        device = self._world.device
        found: list[tuple[NDArray[np.int64], Tensor]] = []
        for batch, members, offsets in self._rows:
            if stop is not None and stop():
                return None
            losses = by_label(batch)
            if losses is None:
                raise UsageError(
                    "tasks cannot be scored: the train module gives no losses of labels",
                    fix="write its method eval_losses",
                )
            labels = batch.labels.to(device, non_blocking=True)
            pieces = torch.from_numpy(offsets).to(device, non_blocking=True)
            found.append((members, sum_by_piece(losses.flatten(), labels, pieces)[0]))
        nats = np.zeros(self._rows.requests)
        for members, sums in found:
            nats[members[members >= 0]] = sums.cpu().numpy()[members >= 0]
        total = self._world.sum(torch.from_numpy(nats).to(device)).cpu().numpy()
        return score(self.eval_set, -total, self._rows.cut, self.truncated)


def open_task(name: str, folder: str, lock: Lock | None) -> EvalSet:
    """Open the eval set of a task and check that its ids mean what they mean in training.

    Args:
        lock: of the training; None: there is none, and the caller checks.

    Raises:
        InputError: there is no eval set in `folder`.
        ValidationError: it is damaged, or of another tokenizer than the mixture.
    """
    eval_set = EvalSet.open(folder)
    if lock is not None:
        require_tokenizer(eval_set.info.tokenizer, lock, f"the eval set {name!r}", folder)
    return eval_set
