"""A step for any model: any `nn.Module`, any loss, any torch optimiser.

The loss of a step is the mean over the global batch, however it is cut into ranks and
micro-batches. Random numbers of the forward pass (dropout) begin anew at each step, from seed, rank
and step, so a resumed run draws those of an undisturbed one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves

from olm_data.config.arguments import checked
from olm_data.config.hints import NonNegativeInt, PositiveFloat
from olm_data.errors import UsageError
from olm_data.run_log.metric_names import CE_LOSS, INSTANCES, TOKENS
from olm_train.data.batch import Batch, batch_words
from olm_train.distributed.world import World
from olm_train.extensions.any_model.wrapping import units
from olm_train.gradient_step import Counted, GradientStep, MicroLoss
from olm_train.loss_context import LossTerms
from olm_train.model.loss import count_valid
from olm_train.optim.given import OptimizerLike, built
from olm_train.optim.schedule import Constant
from olm_train.optim.schedule_base import LRSchedule
from olm_train.optim.state import class_name, make_room, names_of, state_of
from olm_train.parallel.apply import reshard, spread
from olm_train.parallel.config import DataParallelConfig, DataParallelType
from olm_train.stability.gate import FiniteGate, NonFinite

Loss = Callable[..., Tensor]
"""(what the model returned, labels) -> mean loss of the micro-batch, or a loss for each label. One
with an argument `context` is also given the model and a place for its terms: `LossContext`."""
DDP = DataParallelConfig(name=DataParallelType.ddp)


class BasicTrainModule(GradientStep):
    """Any model with its optimiser.

    A batch is (inputs, ..., labels), a mapping with "labels", a `Batch` of a mixture lock, or one
    tensor, which is input and label. All but the labels are given to the model: positions for a
    tuple, names for a mapping. Another form: override `parts`.

    Args:
        model: with its weights, on any device; it is moved, and ranks get those of rank 0.
        optimizer: a class of `torch.optim` or like one, or an instance over the model's parameters.
        loss: see `Loss`. Whatever it is, it is logged as "train/CE loss".
        optim: options of an optimiser given as a class, such as {"lr": 0.1}. Weight decay is for
            parameters of two dimensions or more; for others give an instance.
        world: the processes that train together; None: this one alone, on the CPU.
        scheduler: multiplies the rate of each group.
        max_grad_norm: gradients are scaled down to this global 2-norm; None: never.
        dp_config: how ranks share the weights; `param_dtype: bfloat16` is autocast, weights stay as
            they are.
        wrap_classes, min_num_params: fsdp, hsdp: what is gathered and freed as a whole, see
            `wrapping.units`.
        non_finite: what happens where loss or gradient norm is NaN or infinite.
        seed: of the random numbers of the forward pass, those of torch.

    Attributes:
        model, optimizer, world, config: see `TrainModule`.
        counted: metric of what `count` counts, where batches are none of a lock.

    Raises:
        UsageError: the optimiser needs a closure, has none of the model's parameters, has state of
            whole weights that are sharded now, or options that it is not given.
    """

    counted: ClassVar[str] = INSTANCES

    @checked("model", "optimizer", "loss")
    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerLike,
        loss: Loss,
        *,
        optim: Mapping[str, Any] | None = None,
        world: World | None = None,
        scheduler: LRSchedule | None = None,
        max_grad_norm: PositiveFloat | None = None,
        dp_config: DataParallelConfig = DDP,
        wrap_classes: Sequence[type[nn.Module]] = (),
        min_num_params: int | None = None,
        non_finite: NonFinite = NonFinite.halt,
        seed: NonNegativeInt = 0,
    ) -> None:
        refuse_unfit(model, loss)
        self.world, self.model, self.loss = world or World(), model, loss
        self._scheduler, self._max_grad_norm = scheduler or Constant(), max_grad_norm
        self._seed, self._reduce_each = seed, dp_config.reduce_each_microbatch
        before = names_of(model)
        inner = units(model, wrap_classes, min_num_params)
        self._forward = spread(model, dp_config, self.world, inner)
        self._autocast = torch.bfloat16 if dp_config.param_dtype == "bfloat16" else None
        self.optimizer = built(optimizer, model, optim or {}, before)
        self._gate = FiniteGate(non_finite, self.world.device)
        self.config = {
            "optim": {
                "class": class_name(self.optimizer),
                "peak_lr": [group["peak_lr"] for group in self.optimizer.param_groups],
                **(optim or {}),
            },
            "scheduler": self._scheduler,
            "max_grad_norm": max_grad_norm,
            "dp_config": dp_config,
            "non_finite": non_finite,
            "seed": seed,
        }

    def parts(self, batch: Any) -> tuple[Sequence[Any], Mapping[str, Any], Any]:
        """Return positional and named arguments of the model, and the labels, of a batch."""
        if isinstance(batch, Batch):
            return (batch.input_ids,), {}, batch.labels
        if isinstance(batch, Mapping):
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            return (), inputs, batch.get("labels")
        if isinstance(batch, (tuple, list)) and batch:
            return batch[:-1], {}, batch[-1]
        return (batch,), {}, batch

    def count(self, batch: Any) -> Tensor | int:
        """Return what the loss of a batch is a mean of: labels of a `Batch`, else instances.

        That is the first dimension of the labels, without instances whose labels are all the
        `ignore_index` of the loss; override it for another weight.
        """
        if isinstance(batch, Batch):
            return count_valid(batch.labels)
        arguments, named, labels = self.parts(batch)
        ignored = getattr(self.loss, "ignore_index", None)
        if ignored is not None and isinstance(labels, Tensor) and labels.ndim:
            valid: Tensor = labels != ignored
            return valid.unsqueeze(-1).flatten(1).any(1).sum()
        tensors = [t for t in (labels, *arguments, *named.values()) if isinstance(t, Tensor)]
        if not tensors or not tensors[0].ndim:
            raise UsageError(
                f"what a batch has cannot be counted: the data loader gave {batch_words(batch)}",
                where=type(self).__name__,
                fix="give tensors [instances, ...], or override `count` and `parts`",
            )
        return tensors[0].shape[0]

    def _counted(self, batches: Sequence[Any]) -> Counted:
        self.model.train()
        own = [int(self.count(batch)) for batch in batches]  # before: most are on the host still
        here = [_to(batch, self.world.device) for batch in batches]
        return Counted(
            [*zip(here, own, strict=True)],
            torch.tensor([sum(own)], device=self.world.device),
            names=[TOKENS if isinstance(batches[0], Batch) else self.counted],
        )

    def _loss_of(
        self, batch: tuple[Any, int], divisors: Sequence[Tensor], terms: LossTerms
    ) -> MicroLoss:
        given, count = batch
        share = count / divisors[0]
        part = self._mean_loss(given, count, terms, share) * share
        if not part.requires_grad:
            raise UsageError(
                "the loss has no gradient: it does not depend on a trained parameter",
                where="loss",
                fix="compute it from what the model returned, without detach() or no_grad()",
            )
        return MicroLoss(part, {CE_LOSS: part.detach().to(torch.float32)})

    @torch.no_grad()
    def eval_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of a batch, float64, and what it is a sum over, int64."""
        count = int(self.count(batch))
        self.model.eval()
        terms = LossTerms(self.model, self.world)
        mean = self._mean_loss(_to(batch, self.world.device), count, terms, None)
        return mean.to(torch.float64) * count, torch.tensor(count, device=self.world.device)

    def state_dict(self) -> dict[str, Any]:
        """Return weights, buffers and the optimiser's state; the tensors are the live ones."""
        reshard(self.model)
        return {
            "model": self.model.state_dict(),
            "optim": state_of(self.model, self.optimizer),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state, tensors in place; without "optim" the optimiser is left alone."""
        self.model.load_state_dict(state["model"])
        given = state.get("optim", {})
        make_room(self.model, self.optimizer, given)
        own = state_of(self.model, self.optimizer)
        self._put((name, own[name], value) for name, value in given.items())

    def _mean_loss(self, batch: Any, count: int, terms: LossTerms, share: Tensor | None) -> Tensor:
        """Return the mean loss of a micro-batch; of one without labels 0, not 0 / 0."""
        arguments, named, labels = self.parts(batch)
        device, dtype = self.world.device.type, self._autocast
        given = terms.given(self.loss, share)
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            output = self._forward(*arguments, **named)
            value = self.loss(output, labels, **given) if count else _nothing(output)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            found = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"the loss returned a {found.removeprefix('torch.')}",
                where="loss",
                why="it is a tensor of real numbers: the mean of a micro-batch, or one a label",
                fix="return that tensor alone; other numbers go to trainer.record_metric",
            )
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            return value.mean()

    def _settle_buffers(self, before: list[Tensor], blocked: Tensor) -> None:
        """Give buffers such as running means one value on all ranks, that of before if blocked."""
        for buffer, old in zip(self.model.buffers(), before, strict=True):
            if buffer.is_floating_point():
                buffer.copy_(self.world.sum(buffer) / self.world.size)
            buffer.copy_(torch.where(blocked.to(buffer.device) > 0, old, buffer))

    @contextmanager
    def _passes(self, step: int) -> Iterator[Callable[[Tensor], None]]:
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        device = self.world.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            words = np.random.SeedSequence((self._seed, self.world.rank, step))
            torch.manual_seed(int(words.generate_state(1, np.uint64)[0]))
            yield partial(self._settle_buffers, buffers)


def refuse_unfit(model: nn.Module, loss: Loss) -> None:
    """Refuse a model without values, and a loss that is none or that grows with the batch.

    Raises:
        UsageError: says which.
    """
    if not callable(loss) or inspect.isclass(loss):
        given = f"the class {loss.__name__}" if inspect.isclass(loss) else type(loss).__name__
        raise UsageError(
            f"the loss is {given}",
            where="loss",
            fix="give a function or an instance, such as nn.CrossEntropyLoss()",
        )
    if getattr(loss, "reduction", None) == "sum":
        raise UsageError(
            f"{type(loss).__name__} has reduction='sum'",
            where="loss",
            why="the loss of a step is a mean over the global batch, however it is cut",
            fix="leave the reduction at 'mean', or choose 'none'",
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter) or parameter.is_meta:
            raise UsageError(
                f"the parameter {name} has no values yet",
                where="model",
                fix="call the model once on a batch"
                if isinstance(parameter, UninitializedParameter)
                else "build it outside of torch.device('meta'), or model.to_empty() and set them",
            )


def _nothing(output: Any) -> Tensor:
    """Return a loss of 0 whose gradient is 0 in all that a model returned."""
    leaves = tree_leaves(output)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):  # an object with them as fields
        leaves = tree_leaves(vars(output))
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    zeros = [torch.where(torch.zeros_like(x, dtype=torch.bool), x, 0.0).sum() for x in found]
    return torch.stack([zero.float() for zero in zeros] or [torch.zeros(())]).sum()


def _to(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors, in lists and mappings too, on a device."""
    if isinstance(batch, (Tensor, Batch)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _to(value, device) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [_to(value, device) for value in batch]
    return batch
