"""The experts of a step: counts of all its micro-batches and ranks, and what follows from them.

    micro-batch -> Routed -> terms of the loss, and counts --summed over micro-batches and ranks-->
                          -> once, after the optimiser's step: bias of each router, metrics

The counts leave the forward pass as outputs, so a layer that is computed again in the backward
pass counts once. An evaluation does not ask for them and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from olm_data.run_log.metric_names import (
    DEAD_EXPERTS,
    DROPPED,
    LOAD_ENTROPY,
    LOAD_MAX,
    ROUTER_BIAS,
    ROUTER_Z_LOSS,
    of_balance,
)
from olm_train.data.batch import Batch
from olm_train.distributed.world import World
from olm_train.model.decoder import Decoder
from olm_train.model.loss import IGNORE_INDEX
from olm_train.model.mixture import (
    BalanceLoss,
    BiasBalance,
    DocumentBalance,
    MixtureConfig,
    Routed,
    Router,
    Routing,
    StepBalance,
)


class ExpertBalance:
    """The routers of a decoder, in training.

    Args:
        config: of its feed-forward layers.
        model: the decoder.
        world: the processes that train together.

    Attributes:
        counts: int64 [layers, E], tokens of each expert in this rank's micro-batches of the step so
            far.
        dropped: int64 [layers], those of them that were beyond an expert's capacity.
    """

    def __init__(self, config: MixtureConfig, model: Decoder, world: World) -> None:
        self._config, self._world = config, world
        # by place among the layers with experts; of a pipeline this rank has some of them
        routed = [n for n, part in enumerate(model.config.feed_forwards) if part.routes]
        self._routers = {
            place: each
            for place, layer in enumerate(routed)
            for each in (model.blocks[layer] or nn.Identity()).modules()
            if isinstance(each, Router)
        }
        self._none = torch.zeros(
            len(routed), config.n_experts, dtype=torch.int64, device=world.device
        )
        self.counts, self._foreseen, self.dropped = self._none, self._none, self._none[:, 0]

    @classmethod
    def of(cls, model: Decoder, world: World) -> Self | None:
        """Return that of a decoder, None where it has no experts."""
        config = model.config.feed_forward
        return cls(config, model, world) if isinstance(config, MixtureConfig) else None

    def routing(self, batch: Batch) -> Routing:
        """Return what the routers are to be told of a micro-batch."""
        counted = (batch.labels != IGNORE_INDEX).flatten()
        if not isinstance(self._config.balance, DocumentBalance):
            return Routing(counted)
        places = torch.arange(counted.numel(), dtype=torch.int32, device=counted.device)
        documents = torch.searchsorted(batch.cu_seqlens, places, right=True) - 1
        return Routing(counted, documents, batch.cu_seqlens.numel() - 1)

    def begin(
        self,
        batches: Sequence[Batch],
        look: Callable[[Sequence[Batch]], Sequence[Tensor]],
        *,
        pipelined: bool = False,
    ) -> None:
        """Begin a step.

        Args:
            batches: its micro-batches on this rank.
            look: returns counts of them, each [layers, E], without a gradient.
            pipelined: ranks go through the micro-batches at other times, and cannot meet in one.
        """
        self.counts, self._foreseen, self.dropped = self._none, self._none, self._none[:, 0]
        if isinstance(self._config.balance, StepBalance) and (pipelined or len(batches) > 1):
            self._foreseen = self._world.sum(sum(look(batches), self._none))

    def terms(self, routed: Routed | None, divisor: Tensor) -> dict[str, Tensor]:
        """Count a micro-batch; return its terms of the loss, by the metric that each is.

        Args:
            routed: of the layers, [layers, ...]; zeros of those that another rank has, None if
                these are all.
            divisor: labels of the global batch, which all counted tokens are.
        """
        if routed is None:
            return {}
        self.counts, self.dropped = self.counts + routed.counts, self.dropped + routed.dropped
        config, balance, terms = self._config, self._config.balance, {}
        if isinstance(balance, BalanceLoss):
            if isinstance(balance, DocumentBalance):
                found = routed.within
            else:
                counts = routed.counts
                if isinstance(balance, StepBalance):
                    first = self._foreseen is self._none
                    counts = self._world.sum(counts) if first else self._foreseen
                shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)  # [layers, E]
                found = config.n_experts * (shares * routed.scores).sum(-1)
            terms[of_balance(balance.name)] = balance.weight * found.mean() / divisor
        if config.z_loss:
            terms[ROUTER_Z_LOSS] = config.z_loss * routed.z.mean() / divisor
        return terms

    @torch.no_grad()
    def finish(self, left_out: Tensor) -> dict[str, Tensor]:
        """Move the biases, and return metrics of the step; every rank calls it.

        Args:
            left_out: scalar, 1 if the weights stayed as they were: then so do the biases.
        """
        counts = self._world.sum(self.counts)  # [layers, E]
        load = counts.to(torch.float64)
        mean = load.mean(1, keepdim=True)
        shares = load / load.sum(1, keepdim=True).clamp(min=1)
        entropy = -torch.xlogy(shares, shares).sum(1) / math.log(max(self._config.n_experts, 2))
        metrics = {
            LOAD_MAX: (load.amax(1, keepdim=True) / mean.clamp(min=1e-9)).amax(),
            LOAD_ENTROPY: entropy.mean(),
            DEAD_EXPERTS: (counts == 0).sum(),
        }
        if self._config.capacity_factor is not None:
            metrics[DROPPED] = self._world.sum(self.dropped).sum() / load.sum().clamp(min=1)
        if isinstance(self._config.balance, BiasBalance):
            step = self._config.balance.rate * (mean - load).sign()
            step = (step - step.mean(1, keepdim=True)).to(torch.float32)
            step = torch.where(left_out.to(step.device) > 0, 0.0, step)
            biases = {n: each.bias for n, each in self._routers.items() if each.bias is not None}
            torch._foreach_add_([*biases.values()], [step[place] for place in biases])
            metrics[ROUTER_BIAS] = self._norm([*biases.values()])
        return metrics

    def _norm(self, biases: Sequence[Tensor]) -> Tensor:
        """Return the norm of these and of those of other stages, which each rank of one has."""
        own = (
            torch.stack([*biases]).norm()
            if biases
            else self._none.new_zeros((), dtype=torch.float32)
        )
        if self._world.stages == 1:
            return own
        copies = self._world.size // self._world.stages
        return (self._world.sum(own.square()) / copies).sqrt()
