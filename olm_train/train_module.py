"""The step: model, loss and optimiser. No loop, no files, no clock.

    micro-batches -> count valid labels (all ranks) -> [forward, sum CE / count, backward] * n
                  -> gradient norm -> finite? -> clip -> schedule -> optimiser step -> metrics

The loss of a step is the sum of the cross entropy over the global batch's valid labels divided by
their number. So it does not depend on how the batch is cut into ranks and micro-batches, nor on
how evenly the valid labels fall on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from olm_data.config.arguments import checked
from olm_data.errors import ValidationError
from olm_data.run_log.metric_names import (
    ATTENTION_PAIRS,
    CE_LOSS,
    GRAD_NORM,
    LABELS,
    LR,
    NON_FINITE,
    SEQUENCE_LENGTH,
    STEP_SKIPPED,
    TOKENS,
    Z_LOSS,
)
from olm_train.data.batch import AnyBatch, Batch, check_ids
from olm_train.distributed.world import World
from olm_train.estimate.device_defaults import Capability, resolve
from olm_train.estimate.flops import attention_pairs, num_flops_per_token
from olm_train.loss_context import LossTerms, takes_context
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder, build_decoder
from olm_train.model.head import Head
from olm_train.model.init import init_parameters
from olm_train.model.loss import LossSums, count_valid
from olm_train.model.loss_chunked import by_label_chunked, with_labels
from olm_train.model.loss_config import CHUNK_SIZE
from olm_train.model.shards import assign
from olm_train.optim.clip import as_scalar, clip_gradients, total_norm
from olm_train.optim.muon import Muon
from olm_train.optim.schedule_base import Position
from olm_train.optim.state import make_room, set_values, state_of
from olm_train.parallel.apply import gradient_sync, parallelize, reshard
from olm_train.stability.gate import FiniteGate, NonFinite, take_step
from olm_train.stability.spikes import StepGuard
from olm_train.train_module_base import TrainModule
from olm_train.train_module_config import TransformerTrainModuleConfig

FP32_CHUNK = 1024
"""States that are taken through the head at a time where the logits are to be in fp32."""


class TransformerTrainModule(TrainModule):
    """A decoder with its optimiser.

    Args:
        config: options of the step.
        model: shape of the decoder; or a decoder with its weights, which is trained itself: it is
            moved to the device, in fp32, and ranks get the weights of rank 0.
        seed: with each parameter's name decides its initial value, where a shape is given.
        world: the processes that train together; None: this one alone, on the CPU.
        draw: give the weights their initial values now; False: not before `ensure_weights`, and
            not at all where a state is loaded.

    Attributes:
        config, seed, world: as given, `auto` replaced by what it is on this device.
        model: the decoder, its parameters possibly sharded.
        optimizer: over the parameters of `model`.
        loss: the loss that was chosen.
    """

    @checked()
    def __init__(
        self,
        config: TransformerTrainModuleConfig,
        model: DecoderConfig | Decoder,
        *,
        seed: int,
        world: World | None = None,
        draw: bool = True,
    ) -> None:
        world = world or World()
        given = model if isinstance(model, Decoder) else None
        shape = model.config if isinstance(model, Decoder) else model
        shape, config, _ = resolve(shape, config, Capability.of(world.device))
        compiling = config.compile_model is True
        self.config, self.seed, self.world = config, seed, world
        self._has_weights = False
        torch.set_float32_matmul_precision(config.float32_matmul_precision)
        self.loss = config.loss.choose(
            shape, microbatch=config.rank_microbatch_size, compiling=compiling
        )
        self._loss = self.loss.build()
        weights = None if given is None else given.emptied(shape)
        self.model: Decoder = given or build_decoder(shape, device="meta", dtype=torch.float32)
        self._forward = parallelize(
            self.model,
            config.dp_config,
            world,
            checkpointing=config.ac_config,
            compiling=config.compile_config if compiling else None,
        )
        self.optimizer = config.optim.build(self.model)
        if isinstance(self.optimizer, Muon):
            self.optimizer.world = world
            self.optimizer.reduced = config.dp_config.param_dtype == "bfloat16"
        self._guard: StepGuard | None = getattr(self.optimizer, "guard", None)
        self._gate = FiniteGate(config.non_finite, world.device)
        if weights is not None:
            self._take_over(weights)
        elif draw:
            self.ensure_weights()

    @property
    def num_params(self) -> int:
        """Parameters of the model, without the rows that pad its vocabulary."""
        return self.model.config.num_params

    @property
    def non_finite(self) -> NonFinite:
        """What happens where loss or gradient norm is NaN or infinite."""
        result: NonFinite = self.config.non_finite
        return result

    def check_length(self, steps: int, tokens: int) -> None:
        """Refuse a run that the schedule does not fit.

        Raises:
            UsageError: a part of the schedule is longer than the run.
        """
        self.config.scheduler.factor(
            Position(step=steps, max_steps=steps, tokens=tokens, max_tokens=tokens)
        )

    def describe(self) -> list[str]:
        """Return attention, loss, and the rates of groups that have their own."""
        lines = [f"attention {self.model.config.attention}; loss {self.loss.name}: {self.loss.why}"]
        for number, group in enumerate(self._groups_apart()):
            first = group["names"][0] if group.get("names") else "unnamed"
            lines.append(
                f"group {number}: peak rate {group['peak_lr']:g}, {len(group['params']):,} tensors "
                f"from {first}"
            )
        return lines

    def flops_per_token(self, pairs_per_token: float) -> float:
        """Return the FLOPs of forward and backward for one token."""
        return num_flops_per_token(self.model.config, pairs_per_token=pairs_per_token)

    def ensure_weights(self) -> None:
        """Give the weights their initial values, unless they were drawn or loaded before.

        They are the same bits for every strategy and world.
        """
        if not self._has_weights:
            init_parameters(self.model, self.seed)
            self._has_weights = True

    def train_step(
        self,
        batches: Sequence[Batch | AnyBatch],
        step: int,
        max_steps: int,
        *,
        tokens: tuple[int, int] | None = None,
        batch_growth: float = 1.0,
    ) -> dict[str, Tensor | float]:
        """Take one optimiser step on this rank's micro-batches of a global batch.

        Args:
            batches: the same number on each rank, at least one; moved to the device if need be. See
                `Batch.of` for what one may be.
            step: the step to take, 1..max_steps.
            max_steps: length of the run, for the schedule.
            tokens: trained on after this step, and in the whole run, for a schedule in tokens.
            batch_growth: size of this global batch over that of the run's first, for the rate.

        Returns:
            Metrics of the global batch, the same on each rank; tensors stay on the device.
            By the names of `olm_data.run_log.metric_names`: losses, norm and NON_FINITE fp32,
            counts int64, rate float.
            Where NON_FINITE is 1, nothing was changed by this step, nor is by later ones unless
            the policy is `skip` or a state is loaded.
        """
        if not batches or not 1 <= step <= max_steps:
            raise ValueError(f"step {step} of {max_steps} with {len(batches)} micro-batches")
        assert self._has_weights, "neither ensure_weights nor load_state_dict was called"
        micro = [self._batch(batch) for batch in batches]
        counts = self.world.sum(
            torch.stack([torch.stack(self._counts(batch)) for batch in micro]).sum(0)
        )
        seen, labels, pairs = counts.unbind()
        # A global batch without one valid label has loss 0 and gradient 0, not 0 / 0.
        divisor = labels.clamp(min=1).to(torch.float32)

        # Of the model and not of the optimiser, which may leave parameters alone. After a forward
        # pass without a backward one, as in an evaluation, FSDP2 still shows whole parameters in
        # place of the shards: clearing those would leave the gradients of the last step.
        reshard(self.model)
        self.model.zero_grad(set_to_none=True)
        loss, z_loss = (torch.zeros((), device=self.world.device) for _ in range(2))
        of_labels, terms = self._loss, LossTerms(self.model, self.world)
        if takes_context(of_labels):
            call: Callable[..., LossSums] = of_labels
            of_labels = partial(call, context=terms.context(1 / divisor))
        if self.watch_losses is not None and self.loss.labels_apart:
            of_labels = with_labels(self._loss, self.loss.chunk_size or CHUNK_SIZE)
        for i, batch in enumerate(micro):
            with gradient_sync(self._forward, last=i == len(micro) - 1):
                sums = self._reduce(batch, partial(of_labels, labels=batch.labels))
                (sums.total / divisor).backward()
            if self.watch_losses is not None and sums.by_label is not None:
                self.watch_losses(batch, sums.by_label)
            loss += sums.cross_entropy / divisor
            if sums.z is not None:
                z_loss += sums.z / divisor
        loss = self.world.sum(loss)
        extra = {} if sums.z is None else {Z_LOSS: self.world.sum(z_loss)}

        self.gradients_ready()
        norm = total_norm(self.model.parameters())
        grad_norm = as_scalar(norm).to(self.world.device)  # from the host with cpu_offload
        bad, blocked = self._gate.judge(loss, grad_norm)
        clip_gradients(self.optimizer, norm, self.config.max_grad_norm)
        if self._guard is not None:
            self._guard.push(loss, grad_norm)
        lr = self._set_lr(step, max_steps, tokens, batch_growth)
        take_step(self.optimizer, blocked)
        skipped = {} if self._guard is None else {STEP_SKIPPED: self._guard.skipped()}
        metrics: dict[str, Tensor | float] = {
            CE_LOSS: loss,
            **extra,
            GRAD_NORM: grad_norm,
            LR: lr,
            **skipped,
            TOKENS: seen,
            LABELS: labels,
            ATTENTION_PAIRS: pairs,
            SEQUENCE_LENGTH: micro[0].max_seqlen,
            NON_FINITE: bad,
        }
        return terms.summed(metrics) if takes_context(self._loss) else metrics

    @torch.no_grad()
    def eval_losses(self, batch: Batch | AnyBatch, *, fp32_logits: bool = False) -> Tensor:
        """Return the cross entropy of each label of this rank's batch, without a step.

        Args:
            batch: moved to the device if need be.
            fp32_logits: see `by_label_chunked`; at most 1,024 rows of logits exist at a time.

        Returns:
            fp32 [b, S] on the device, in nats; 0 where a label is ignored.
        """
        assert self._has_weights, "neither ensure_weights nor load_state_dict was called"
        here = self._batch(batch)
        chunk_size = self.loss.chunk_size
        if fp32_logits:
            chunk_size = min(chunk_size or FP32_CHUNK, FP32_CHUNK)
        by_label = partial(
            by_label_chunked, labels=here.labels, chunk_size=chunk_size, fp32_logits=fp32_logits
        )
        losses: Tensor = self._reduce(here, by_label)
        return losses

    def eval_batch(self, batch: Batch | AnyBatch) -> tuple[Tensor, Tensor]:
        """Loss of this rank's batch without a step.

        Returns:
            Sum of the cross entropy in nats (float64) and number of valid labels (int64), scalars
            on the device. Add both up over batches and ranks before dividing.
        """
        here = self._batch(batch)
        return self.eval_losses(here).sum(dtype=torch.float64), count_valid(here.labels)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Weights and optimiser state, under names that do not depend on the parallelism.

        Returns:
            {"model": {parameter: tensor}, "optim": {"parameter.exp_avg": tensor, ...}}, DTensors
            where sharded: what torch's distributed checkpoint saves, and loads in place under any
            other sharding. They are the live ones: copy before an async save. What else the
            optimiser keeps of a parameter is there as a plain value.
        """
        reshard(self.model)
        guard = {} if self._guard is None else self._guard.state()
        return {
            "model": {name: parameter.data for name, parameter in self.model.named_parameters()},
            "optim": state_of(self.model, self.optimizer) | guard,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over a state; tensors may be full or sharded as here.

        Args:
            state: as `state_dict` returns it. Without "optim" the optimiser is left alone.

        Raises:
            ValidationError: a name or shape does not fit; then nothing is changed.
        """
        if "optim" in state:
            make_room(self.model, self.optimizer, state["optim"])
        own = self.state_dict()
        pairs = list(_paired(own["model"], state["model"], "model"))
        if "optim" in state:
            pairs += _paired(own["optim"], state["optim"], "optim")
        values = {}
        for name, target, source in pairs:
            if not isinstance(source, Tensor):
                values[name] = source
            elif isinstance(source, DTensor):
                target.copy_(source)
            else:
                assign(target, source)
        set_values(self.model, self.optimizer, values)
        self._has_weights = True
        self._gate.open()

    @torch.no_grad()
    def _take_over(self, weights: dict[str, Tensor]) -> None:
        """Give the model the weights of rank 0, a tensor at a time."""
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        for name, target in tensors:
            whole = weights.pop(name).to(self.world.device, target.dtype)
            assign(target, self.world.from_main(whole))
        self._has_weights = True

    def _batch(self, given: Batch | AnyBatch) -> Batch:
        """Return a micro-batch of ids that the model has, on the device."""
        return check_ids(Batch.of(given), self.model_config.vocab_size).to(self.world.device)

    def _reduce(self, batch: Batch, reduce: Callable[[Head, Tensor], Any]) -> Any:
        return self._forward(
            batch.input_ids,
            doc_start=batch.doc_start,
            positions=batch.positions,
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
            reduce=reduce,
        )

    def _counts(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, valid labels and attention pairs of a batch, int64 scalars on its device."""
        tokens = batch.positions.new_full((), batch.positions.numel(), dtype=torch.int64)
        pairs = attention_pairs(self.model.config, batch.positions)
        return tokens, count_valid(batch.labels), pairs

    def _set_lr(
        self, step: int, max_steps: int, tokens: tuple[int, int] | None, batch_growth: float
    ) -> float:
        scheduler = self.config.scheduler
        if tokens is None and scheduler.units == "tokens":
            raise ValueError("the schedule counts tokens: give train_step those of the run")
        seen, total = tokens or (0, 0)
        factor = scheduler.factor(
            Position(step=step, max_steps=max_steps, tokens=seen, max_tokens=total)
        )
        factor *= self.config.lr_batch_scaling.factor(batch_growth)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        result: float = self.config.optim.lr * factor
        return result

    def _groups_apart(self) -> list[dict[str, Any]]:
        """Return the groups of the optimiser, or none where they have one rate."""
        groups = self.optimizer.param_groups
        return groups if len({group["peak_lr"] for group in groups}) > 1 else []


def _paired(
    own: Mapping[str, Any], given: Mapping[str, Any], what: str
) -> Iterator[tuple[str, Any, Any]]:
    wrong = [f"missing {name}" for name in sorted(own.keys() - given.keys())]
    wrong += [f"unexpected {name}" for name in sorted(given.keys() - own.keys())]
    wrong += [
        f"{name} {_kind(given[name])}, here it {_kind(own[name])}"
        for name in sorted(own.keys() & given.keys())
        if _kind(own[name]) != _kind(given[name])
    ]
    if wrong:
        raise ValidationError(
            f"the {what} state does not fit this configuration: {'; '.join(wrong[:5])}",
            why=f"{len(wrong)} of {len(own)} tensors differ",
            fix="use the model configuration the state was saved with",
        )
    return ((name, own[name], given[name]) for name in own)


def _kind(leaf: Any) -> str:
    return f"has shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else "is a plain value"
